// sm90/score_again.h: scores of a tile once more, from global memory.
//
// For a tile whose scores jump so far above the maximum of the tiles before that their exponentials
// are lost (core/online_softmax.h, lost): by more than 69 in natural units. Rare, and slow, so that
// nothing in shared memory has to be kept for it.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/sm90/forward_tile.h"

namespace cute_attention::sm90 {

// Q K^T of two rows that lie 8 apart with the thread's columns of an m64nN accumulator, by plain
// products in fp32.
//   row     of the tile, the first of the two
//   key     of the sequence, the tile's first; all keys of the tile are inside
//   thread  of the warpgroup
//   scores  (2, COLS)
template <class Element, class Scores>
CUTE_DEVICE void score_again(ForwardArguments const& arguments, ForwardTile const& tile,
                             int32_t row, int32_t key, int thread, Scores&& scores) {
  using namespace cute;
  ForwardParams const& params = arguments.params;
  Element const* q[2];
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    // Rows of no query repeat the last: nobody reads their scores.
    int32_t const query =
        min_of(tile.m_begin + arguments.packing.query(row + 8 * i), tile.sequence.seqlen_q - 1);
    int32_t const head =
        tile.work.head + min_of(arguments.packing.head(row + 8 * i), tile.heads - 1);
    q[i] = static_cast<Element const*>(params.q) + tile.work.batch * params.q_stride.batch +
           head * params.q_stride.head + (tile.sequence.row_q + query) * params.q_stride.row;
  }
  int32_t const head_kv = tile.work.head / (params.heads / params.heads_kv);
  Element const* k =
      static_cast<Element const*>(params.k) + tile.work.batch * params.k_stride.batch +
      head_kv * params.k_stride.head +
      (tile.sequence.row_k + key + 2 * (thread % kThreadsPerRow)) * params.k_stride.row;
  CUTE_UNROLL
  for (int col = 0; col < size<1>(scores); ++col) {
    float sums[2] = {};
#pragma unroll 1
    for (int32_t d = 0; d < params.head_dim; ++d) {
      float const value = float(k[d]);
      sums[0] += float(q[0][d]) * value;
      sums[1] += float(q[1][d]) * value;
    }
    scores(0, col) = sums[0];
    scores(1, col) = sums[1];
    k += (col % 2 == 0 ? 1 : 7) * params.k_stride.row;  // columns 0, 1, 8, 9, 16, ...
  }
}

}  // namespace cute_attention::sm90
