// sm90/last_split.h: the end of a split of a tile of queries. Where the tile has few rows, the
// warpgroup that ends its last split combines them, and no kernel has to.
//
// Only kernels for keys in a cache do: decoding has few rows. What a warpgroup combines are its own
// rows of all splits of the tile, in the order of the splits, whichever of them ends last.
#pragma once

#include "cute_attention/core/combine_row.h"
#include "cute_attention/element.h"
#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/cached_keys.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/tile_rows.h"
#include "cute_attention/sm90/warpgroup.h"

namespace cute_attention::sm90 {

// The counter of a warpgroup of a tile, the same one for all splits.
template <class Row>
CUTE_DEVICE int32_t* arrivals_of(ForwardArguments const& arguments, ForwardTile const& tile,
                                 int warpgroup) {
  QueryPacking const& packing = arguments.packing;
  int32_t const heads = arguments.params.heads_kv * packing.parts;
  int32_t const head = tile.work.batch * heads + tile.index;
  int32_t const index = head * arguments.schedule.m_blocks + tile.work.m_block;
  return arguments.split_arrivals + index * (Row::kConfig.tile_m / kWarpgroupM) + warpgroup;
}

// Whether all splits of the tile have ended. All threads of the warpgroup call it together, after
// they have written what this split has. PTX ISA, "atom" and "barrier.red".
template <class Row>
CUTE_DEVICE bool is_last_split(ForwardArguments const& arguments, ForwardTile const& tile,
                               int warpgroup, int thread) {
  uint32_t const barrier = uint32_t(NamedBarrier::kSplit) + warpgroup;
  // Whoever sees the arrival sees what all threads wrote before the barrier.
  cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, barrier);
  uint32_t last = 0;
  if (thread == 0) {
    int32_t* const arrivals = arrivals_of<Row>(arguments, tile, warpgroup);
    int32_t arrived;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(arrived)
                 : "l"(arrivals)
                 : "memory");
    last = arrived == arguments.params.num_splits - 1;
    if (last) {
      *arrivals = 0;
    }
  }
  __syncwarp();
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "barrier.cta.red.or.aligned.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "+r"(last)
      : "r"(barrier), "n"(kWarpgroupThreads)
      : "memory");
  return last != 0;
}

// Whether the last split of a tile may combine them all in the kernel of a row.
template <class Row>
constexpr bool kCombinesSplits = kReadsCache<Row> && !has_qv(Row::kKey.score_mods);

// Called by all threads of a warpgroup once they have written what a split has of its rows.
template <class Row>
CUTE_DEVICE void end_split(ForwardArguments const& arguments, ForwardTile const& tile,
                           int32_t m_offset, int thread) {
  using Element = ElementOf<Row::kKey.dtype>;
  ForwardParams const& params = arguments.params;
  QueryPacking const& packing = arguments.packing;
  int32_t const queries = tile.sequence.seqlen_q - tile.m_begin - packing.query(m_offset);
  // A warpgroup without queries arrives in no split.
  if (arguments.split_arrivals == nullptr || queries <= 0 ||
      !is_last_split<Row>(arguments, tile, m_offset / kWarpgroupM, thread)) {
    return;
  }
  int32_t const rows = min_of(min_of(queries, kWarpgroupM) << packing.shift, kWarpgroupM);
  int const team = team_size(params.num_splits);
  for (int32_t row = thread / 32; row < rows; row += kWarpgroupWarps) {
    StoreRow<Element> const target(arguments, tile, m_offset + row);
    if (!target.inside) {
      continue;
    }
    int64_t const index = target.index(params, tile);
    for (int32_t begin = 0; begin < params.head_dim_v; begin += kCombinedCols) {
      int32_t const col = begin + 4 * lane_of_warp();
      RowSplits<kMostOfLast> splits;
      float4 const total = sum_of_members(params, splits, index, col, team);
      store_combined<Element>(params, splits, {target.head, target.o, target.lse}, total, col);
    }
  }
}

}  // namespace cute_attention::sm90
