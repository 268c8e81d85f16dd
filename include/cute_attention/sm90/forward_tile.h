// sm90/forward_tile.h: a tile of queries, and what the kernel is given.
#pragma once

#include <cutlass/fast_math.h>

#include <cute/arch/copy_sm90_desc.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm90/bias_tiles.h"

namespace cute_attention::sm90 {

// How many tiles of queries a CTA knows at a time: the one that the consumers compute; the next
// one, whose first K is loaded while they still compute; and one more, because a tile with few KV
// tiles does not fill the stages of K. A CTA that took more would take them from CTAs that are free
// sooner.
constexpr int kTileSlots = 3;

// What the kernel is given; constant over the grid.
struct ForwardArguments {
  ForwardParams params;
  Schedule schedule;                 // its heads are the splits of those of the packing
  cutlass::FastDivmod by_splits;     // the number of splits
  cutlass::FastDivmod by_page_size;  // where keys lie in pages
  QueryPacking packing;
  cutlass::FastDivmod by_parts;  // of the packing
  int32_t box_rows_k;  // of a tile of keys so many rows are loaded at once: all, unless from pages
  cute::TMA::CacheHintSm90 keys_hint;  // what L2 is told of K and V
  CUtensorMap map_q;                   // boxes of 64 rows of the packing
  CUtensorMap map_k;                   // boxes of box_rows_k rows
  CUtensorMap map_v;
  BiasTiles bias;      // of tile_m rows; unused where the kernel reads no such tiles
  CUtensorMap map_qv;  // boxes of 64 rows of the packing; unused in rows without qv
  CUtensorMap map_o;   // boxes of a warp's 16 rows of the packing; unused where threads store O
  bool stores_boxes;   // whether O is stored by TMA (output_boxes.h), or else by threads
  // Counts the splits of each warpgroup of each tile that have ended; null: a kernel after this one
  // combines them (last_split.h).
  int32_t* split_arrivals;
  // Counts the tiles that CTAs have taken beside their first; null: each CTA computes which tiles
  // are its own, or they are of packed sequences.
  uint32_t* taken_tiles;
};

// The most warpgroups that compute.
constexpr int kMostConsumers = 3;

// A tile of queries and the KV tiles it needs, in shared memory. The scheduler warp writes it
// (forward_schedule.h), the load warps and the consumers read it.
struct ForwardTile {
  WorkTile work;          // its head is the first of the tile's
  int32_t index;          // of these heads among the tiles of a sequence's (QueryPacking)
  int32_t head_kv;        // that they read
  int32_t head_of_group;  // the first of them, among those that read it
  int32_t heads;          // of the tile
  int32_t split;          // of its keys
  // The first key that is loaded; 0 unless keys lie in pages. Kernels that read a cache have it.
  int32_t first_loaded;
  Sequence sequence;
  int32_t m_begin;                // its first query
  KvTiles kv;                     // of the split
  KvTiles walks[kMostConsumers];  // of them those that each warpgroup visits

  CUTE_DEVICE bool sees_keys() const { return kv.begin < kv.end; }
  CUTE_DEVICE bool is_end() const { return m_begin < 0; }  // there are no more tiles
};

}  // namespace cute_attention::sm90
