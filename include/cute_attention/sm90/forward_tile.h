// sm90/forward_tile.h: the tiles of queries that a CTA computes, one after the other.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/packed_blocks.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention::sm90 {

// What the kernel is given; constant over the grid.
struct ForwardArguments {
  ForwardParams params;
  Schedule schedule;
  CUtensorMap map_q;  // boxes of 64 rows
  CUtensorMap map_k;  // boxes of tile_n rows
  CUtensorMap map_v;
};

// A tile of queries and the KV tiles it needs. The producer writes it, the consumers read it in
// shared memory.
struct ForwardTile {
  WorkTile work;
  Sequence sequence;
  int32_t m_begin;
  KvTiles kv;

  CUTE_DEVICE bool sees_keys() const { return kv.begin < kv.end; }
  CUTE_DEVICE bool is_end() const { return m_begin < 0; }  // there are no more tiles
};

// The tiles of this CTA, one after the other.
template <int kTileM, int kTileN>
struct TileWalk {
  ForwardParams const& params;
  Schedule const& schedule;
  int32_t round = 0;

  // The next tile; after the last, the end. All threads of a warp call it together.
  CUTE_DEVICE ForwardTile next() {
    ForwardTile tile;
    tile.m_begin = -1;
    bool more = true;
    while (more && !locate(tile.work, more)) {
    }
    if (more) {
      tile.sequence = load_sequence(params, tile.work.batch);
      tile.m_begin = tile.work.m_block * kTileM;
      tile.kv = kv_tiles(tile.sequence, tile.m_begin, kTileM, kTileN);
    }
    return tile;
  }

 private:
  // The tile of the next round, if it has one. Where packed, the tiles that shorter sequences do
  // not have are not counted.
  CUTE_DEVICE bool locate(WorkTile& work, bool& more) {
    int32_t const cta = int32_t(blockIdx.x), ctas = int32_t(gridDim.x);
    if (params.cu_seqlens_q == nullptr) {
      return schedule.tile(cta, ctas, round++, work, more);
    }
    int32_t const index = round++ * ctas + cta;
    PackedBlock const block =
        find_packed_block(params.cu_seqlens_q, params.batch, kTileM, index / schedule.heads);
    work = {block.m_block, index % schedule.heads, block.batch};
    more = block.batch < params.batch;
    return more;
  }
};

}  // namespace cute_attention::sm90
