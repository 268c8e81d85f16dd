// sm90/forward_schedule.h: the scheduler warp: the tiles of queries that a CTA computes, one after
// the other.
#pragma once

#include "cute_attention/core/key_pages.h"
#include "cute_attention/core/key_splits.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/packed_blocks.h"
#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/cached_keys.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/warpgroup.h"

namespace cute_attention::sm90 {

// The tiles of this CTA, one after the other.
template <class Row>
struct TileWalk {
  static constexpr int kTileM = Row::kConfig.tile_m, kTileN = Row::kConfig.tile_n;

  ForwardParams const& params;
  uint32_t* const& taken_tiles;
  Schedule const& schedule;
  QueryPacking const& packing;
  cutlass::FastDivmod const& by_splits;
  cutlass::FastDivmod const& by_parts;
  int32_t const& box_rows_k;
  PackedBlocks blocks;  // of packed sequences
  int32_t round = 0;

  CUTE_DEVICE explicit TileWalk(ForwardArguments const& arguments)
      : params(arguments.params),
        taken_tiles(arguments.taken_tiles),
        schedule(arguments.schedule),
        packing(arguments.packing),
        by_splits(arguments.by_splits),
        by_parts(arguments.by_parts),
        box_rows_k(arguments.box_rows_k),
        blocks{params.cu_seqlens_q, params.batch, packing.queries(kTileM)} {}

  // Writes the next tile to shared memory; after the last, the end, and returns false. All threads
  // of a warp call it together, and all write the same.
  CUTE_DEVICE bool next(ForwardTile& tile) {
    WorkTile work;
    bool more = true;
    while (more && !locate(work, more)) {
    }
    if (!more) {
      tile.m_begin = -1;
      return false;
    }
    int32_t index = work.head, split = 0;
    if (has_splits(params)) {
      by_splits(index, split, work.head);
    }
    tile.index = index;
    int32_t head_kv, part;
    by_parts(head_kv, part, index);
    tile.head_kv = head_kv;
    tile.head_of_group = packing.head_of_group(part);
    work.head = head_kv * packing.group + packing.head_of_group(part);
    int32_t const queries = packing.queries(kTileM);
    int32_t const m_begin = work.m_block * queries;
    tile.work = work;
    tile.heads = packing.heads_of_part(part);
    tile.split = split;
    tile.m_begin = m_begin;
    constexpr bool kCached = kReadsCache<Row>;
    Sequence const sequence = load_sequence_of<kCached, kCached>(params, work.batch);
    tile.sequence = sequence;
    if constexpr (kCached) {
      tile.first_loaded = has_pages(params)
                              ? first_loaded_key(first_visible_key(sequence, m_begin), box_rows_k)
                              : 0;
    }
    written();
    KvTiles const all = kv_tiles(sequence, m_begin, queries, kTileN);
    KvTiles kv = all;
    if (has_splits(params)) {
      kv = split_tiles(all, split, params.num_splits, by_splits.div(all.end - all.begin));
    }
    tile.kv = kv;
    // The first warpgroup may have all queries, as in decoding: the others are idle then.
    if (kCached && m_begin + packing.queries(kWarpgroupM) >= sequence.seqlen_q) {
      tile.walks[0] = visited_tiles(kv, all);
      return true;
    }
    // Where every query sees all whole KV tiles, warpgroups need the same ones. One without queries
    // does not look at its walk.
    bool const need_the_same =
        all.full_begin <= all.begin && all.full_end == sequence.seqlen_k / kTileN;
    CUTE_UNROLL
    for (int warpgroup = 0; warpgroup < kTileM / kWarpgroupM; ++warpgroup) {
      written();
      int32_t const first = m_begin + packing.query(warpgroup * kWarpgroupM);
      KvTiles const own =
          need_the_same ? all : kv_tiles(sequence, first, packing.queries(kWarpgroupM), kTileN);
      tile.walks[warpgroup] = visited_tiles(kv, own);
    }
    return true;
  }

  // Whether CTAs take their tiles from a counter, and not that of packed sequences.
  CUTE_DEVICE bool takes_tiles() const { return kTakesTiles<Row> && taken_tiles != nullptr; }

 private:
  // Has the compiler write what there is of a tile: it would hold all of it in registers, to write
  // it at once, and the warp has few.
  CUTE_DEVICE static void written() { asm volatile("" ::: "memory"); }

  // The tile of the next round, if it has one. Where packed, the tiles that shorter sequences do
  // not have are not counted.
  CUTE_DEVICE bool locate(WorkTile& work, bool& more) {
    int32_t const cta = int32_t(blockIdx.x), ctas = int32_t(gridDim.x);
    if (takes_tiles()) {
      int32_t const index = next_taken(cta, ctas);
      more = index < schedule.tiles;
      work = more ? schedule.taken(index) : WorkTile{};
      return more;
    }
    if (params.cu_seqlens_q == nullptr) {
      if (kReadsCache<Row> && schedule.tiles == ctas) {
        more = round++ == 0;
        work = schedule.tile_of_heads(cta);  // the order of tiles says nothing where each has one
        return more;
      }
      return schedule.tile(cta, ctas, round++, work, more);
    }
    int32_t const index = next_index(cta, ctas);
    int32_t number, head;
    schedule.by_heads(number, head, index);
    PackedBlock const block = blocks.find(number);
    // From the last block of a sequence to its first.
    work = {block.after, head, block.batch};
    more = block.batch < params.batch;
    return more;
  }

  // Every launch counts `tiles` times: each CTA once for each tile after its first, and once more
  // to see that there are no more. So the counter, which wraps, ends at zero, where it begins.
  CUTE_DEVICE int32_t next_taken(int32_t cta, int32_t ctas) {
    if (round++ == 0) {
      return cta;
    }
    uint32_t taken = 0;
    if (lane_of_warp() == 0) {
      taken = atomicInc(taken_tiles, uint32_t(schedule.tiles - 1));
    }
    return ctas + warp_uniform(int32_t(taken));
  }

  // Sequences differ in length, so that equal shares of tiles are unequal work: after the first,
  // whoever is free takes the next.
  CUTE_DEVICE int32_t next_index(int32_t cta, int32_t ctas) {
    if (round++ == 0) {
      return cta;
    }
    if (params.next_tile == nullptr) {
      return (round - 1) * ctas + cta;
    }
    int32_t taken = 0;
    if (lane_of_warp() == 0) {
      taken = atomicAdd(params.next_tile, 1);
    }
    return ctas + warp_uniform(taken);
  }
};

// The scheduler warp: says which tile comes next as soon as there is a place to write it. What it
// waits for, divisions and reads of global memory, holds nobody up.
template <class Row, class SharedMemory>
CUTE_DEVICE void schedule_tiles(ForwardArguments const& arguments, SharedMemory& shared) {
  TileWalk<Row> walk(arguments);
  Ring<kTileSlots> ring{};
  [[maybe_unused]] Ring<1> wanted{};
  [[maybe_unused]] bool is_first = true;
  bool more = true;
  while (more) {
    Barrier::wait(&shared.tile_empty[ring.stage], ring.parity ^ 1);
    if constexpr (kTakesTiles<Row>) {
      if (walk.takes_tiles() && !is_first) {
        Barrier::wait(&shared.next_wanted, wanted.parity);
        wanted.advance();
      }
      is_first = false;
    }
    more = walk.next(shared.tiles[ring.stage]);
    __syncwarp();  // all lanes have written it
    if (lane_of_warp() == 0) {
      Barrier::arrive(&shared.tile_full[ring.stage]);
    }
    ring.advance();
  }
}

}  // namespace cute_attention::sm90
