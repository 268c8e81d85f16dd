// core/unused_rows.h: fills the rows of packed outputs that no tile of the grid computes: rows
// after the last sequence, and the last rows of a sequence that is longer than the caller said.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/address.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

// What a row is filled with: two elements of 16 bits of either type.
constexpr uint32_t kZeros = 0;
constexpr uint32_t kNaNs = 0xffffffff;

// `cols` elements of 16 bits, a multiple of 8, are filled. All threads of a warp call it.
template <class Element>
CUTE_DEVICE void fill_row(Element* row, int32_t cols, uint32_t filling) {
  for (int32_t col = 8 * (int32_t(threadIdx.x) % 32); col < cols; col += 8 * 32) {
    *reinterpret_cast<uint4*>(row + col) = uint4{filling, filling, filling, filling};
  }
}

// Rows after the last sequence's, where there are any: output 0, LSE -infinity. Each warp
// clears its share.
template <class Element>
CUTE_DEVICE void clear_unused_rows(ForwardParams const& params, GridWarp const& warp) {
  if (params.cu_seqlens_q == nullptr) {
    return;
  }
  int64_t row = int64_t(params.cu_seqlens_q[params.batch]) + warp.index;
  for (; row < params.total_q; row += warp.count) {
    for (int32_t head = 0; head < params.heads; ++head) {
      fill_row(row_pointer(static_cast<Element*>(params.o), params.o_stride, 0, head, row),
               params.head_dim_v, kZeros);
      if (params.lse != nullptr && int32_t(threadIdx.x) % 32 == 0) {
        params.lse[head * params.total_q + row] = -INFINITY;
      }
    }
  }
}

// This warp among the warps of all CTAs (of `threads` threads each) that compute a tile of one head
// of one sequence. A sequence may be longer than params.seqlen_q, the length that the grid was made
// for: these CTAs share the queries that are left.
template <class Params>
CUTE_DEVICE GridWarp head_warp(Params const& params, WorkTile const& work, int32_t tile_m,
                               int32_t threads) {
  return grid_warp(work.m_block, ceil_div(params.seqlen_q, tile_m), threadIdx.x, threads);
}

// Where a packed sequence is longer than params.seqlen_q, its queries past the last tile of the
// grid, which nobody computes: output and LSE NaN.
template <class Element>
CUTE_DEVICE void mark_queries_without_tile(ForwardParams const& params, WorkTile const& work,
                                           int32_t tile_m, int32_t threads) {
  if (params.cu_seqlens_q == nullptr) {
    return;
  }
  Sequence const sequence = load_sequence(params, work.batch);
  GridWarp const warp = head_warp(params, work, tile_m, threads);
  int64_t query = int64_t(ceil_div(params.seqlen_q, tile_m)) * tile_m + warp.index;
  for (; query < sequence.seqlen_q; query += warp.count) {
    fill_row(row_pointer(static_cast<Element*>(params.o), params.o_stride, 0, work.head,
                         sequence.row_q + query),
             params.head_dim_v, kNaNs);
    if (params.lse != nullptr && int32_t(threadIdx.x) % 32 == 0) {
      params.lse[lse_index(params, sequence, work.batch, work.head, query)] = NAN;
    }
  }
}

}  // namespace cute_attention
