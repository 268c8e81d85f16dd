// sm80/row_exchange.h: combines one number for each row of scores across the warps that divide the
// keys of the row among themselves, such as their maxima or sums.
#pragma once

#include <cute/tensor.hpp>

namespace cute_attention::sm80 {

// Lies in shared memory. The warps form a grid of kWarpsM x kWarpsN over a tile of kTileM queries;
// the warps in one row of the grid have the same queries and different keys.
template <int kTileM, int kWarpsM, int kWarpsN>
struct RowExchange {
  float numbers[kWarpsN][kTileM];

  // The column of a thread's warp in the grid.
  CUTE_HOST_DEVICE static constexpr int column(int thread) { return thread / (32 * kWarpsM); }

  // Combines each number of `rows` (ROWS) with the numbers that the other warps have for the same
  // row; queries(row) is the row's place in the tile. The four threads of a warp that share a row
  // must give the same number, so it does not matter which of them writes last. All threads of the
  // CTA call this, and between two calls the caller needs a barrier.
  template <class Rows, class Queries, class Op>
  CUTE_DEVICE void combine(Rows& rows, Queries const& queries, int thread, Op const& op) {
    using namespace cute;
    int const own = column(thread);
    CUTE_UNROLL
    for (int row = 0; row < size(rows); ++row) {
      numbers[own][queries(row)] = rows(row);
    }
    __syncthreads();  // all threads have written their numbers
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
