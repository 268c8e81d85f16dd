// core/unused_rows.h: fills the rows of packed outputs that no tile of the grid computes. These are
// the rows after the last sequence, and the last rows of a sequence that is longer than the caller
// said.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/address.h"
#include "cute_attention/core/key_splits.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

// What a row is filled with: a word of two 16-bit elements, with the same bits in fp16 and bf16.
constexpr uint32_t kZeros = 0;
constexpr uint32_t kNaNs = 0xffffffff;

// Fills a row of `cols` 16-bit elements with the word `filling`. `cols` is a multiple of 8. All
// threads of a warp call it together, and each writes a part.
template <class Element>
CUTE_DEVICE void fill_row(Element* row, int32_t cols, uint32_t filling) {
  for (int32_t col = 8 * (int32_t(threadIdx.x) % 32); col < cols; col += 8 * 32) {
    *reinterpret_cast<uint4*>(row + col) = uint4{filling, filling, filling, filling};
  }
}

// Writes the rows after the last packed sequence, if there are any: output 0, LSE -infinity. The
// warps divide these rows among themselves; `warp` is the one that calls.
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

// The number of this warp among the warps of all CTAs that compute a tile of the same head of the
// same sequence. Each of these CTAs has `threads` threads. A packed sequence may be longer than
// params.seqlen_q, the length for which the grid was made: then these warps divide the queries that
// have no tile among themselves.
template <class Params>
CUTE_DEVICE GridWarp head_warp(Params const& params, WorkTile const& work, int32_t tile_m,
                               int32_t threads) {
  return grid_warp(work.m_block, ceil_div(params.seqlen_q, tile_m), threadIdx.x, threads);
}

// Writes NaN to the output and the LSE of the queries that have no tile: those that lie past the
// last tile of the grid, in a packed sequence that is longer than params.seqlen_q. Where keys are
// divided, the sum of a split is NaN instead, which the combined row then is, too.
template <class Element>
CUTE_DEVICE void mark_queries_without_tile(ForwardParams const& params, WorkTile const& work,
                                           int32_t tile_m, int32_t threads, int32_t split) {
  if (params.cu_seqlens_q == nullptr) {
    return;
  }
  Sequence const sequence = load_sequence(params, work.batch);
  GridWarp const warp = head_warp(params, work, tile_m, threads);
  int64_t query = int64_t(ceil_div(params.seqlen_q, tile_m)) * tile_m + warp.index;
  for (; query < sequence.seqlen_q; query += warp.count) {
    int64_t const index = lse_index(params, sequence, work.batch, work.head, query);
    if (has_splits(params)) {
      *split_sum(params, split, index) = {NAN, NAN};
      continue;
    }
    fill_row(row_pointer(static_cast<Element*>(params.o), params.o_stride, 0, work.head,
                         sequence.row_q + query),
             params.head_dim_v, kNaNs);
    if (params.lse != nullptr && int32_t(threadIdx.x) % 32 == 0) {
      params.lse[index] = NAN;
    }
  }
}

}  // namespace cute_attention
