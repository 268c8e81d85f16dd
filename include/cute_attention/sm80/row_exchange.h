// sm80/row_exchange.h: numbers of rows of scores whose keys several warps share.
#pragma once

#include <cute/tensor.hpp>

namespace cute_attention::sm80 {

// A grid of kWarpsM x kWarpsN warps over a tile of kTileM queries; the warps of one row of the grid
// have the same queries.
template <int kTileM, int kWarpsM, int kWarpsN>
struct RowExchange {
  float numbers[kWarpsN][kTileM];

  // A thread's column in the grid of warps.
  CUTE_HOST_DEVICE static constexpr int column(int thread) { return thread / (32 * kWarpsM); }

  // Combines each of `rows` (ROWS) with those of the other warps that have the row. `queries`
  // (ROWS) are the rows in the tile. The four threads that share a row in a warp give the same
  // number. All threads of the CTA call this, and meet between one call and the next.
  template <class Rows, class Queries, class Op>
  CUTE_DEVICE void combine(Rows& rows, Queries const& queries, int thread, Op const& op) {
    using namespace cute;
    int const own = column(thread);
    CUTE_UNROLL
    for (int row = 0; row < size(rows); ++row) {
      numbers[own][queries(row)] = rows(row);
    }
    __syncthreads();
    CUTE_UNROLL
    for (int row = 0; row < size(rows); ++row) {
      CUTE_UNROLL
      for (int i = 1; i < kWarpsN; ++i) {
        rows(row) = op(rows(row), numbers[(own + i) % kWarpsN][queries(row)]);
      }
    }
  }
};

}  // namespace cute_attention::sm80
