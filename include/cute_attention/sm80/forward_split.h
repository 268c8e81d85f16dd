// sm80/forward_split.h: what a split of the keys leaves of a tile of queries, from registers to the
// workspace (core/key_splits.h).
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/key_splits.h"

namespace cute_attention::sm80 {

// Stores the rows of a tile that are queries.
//   places         which rows are queries, and what their numbers in the LSE are (forward_rows.h)
//   rO             (ROWS, COLS)  this thread's part of O
//   cO             (ROWS, COLS)  the (row, column) in the tile of each of its elements
//   rSums, rBases  (ROWS)
template <class Places, class Output, class Coords, class Rows>
CUTE_DEVICE void store_split_rows(ForwardParams const& params, int32_t split, Places const& places,
                                  Output const& rO, Coords const& cO, Rows const& rSums,
                                  Rows const& rBases) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(shape(cO) == shape(rO));
  CUTE_STATIC_ASSERT_V(size<0>(rO) == size(rSums));
  CUTE_UNROLL
  for (int row = 0; row < size<0>(rO); ++row) {
    int const place = int(get<0>(cO(row, 0)));
    if (!places.inside(place)) {
      continue;
    }
    float* const target = split_output(params, split, places.at(place));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(rO); col += 2) {  // two that lie side by side
      int const first_col = int(get<1>(cO(row, col)));
      if (first_col < params.head_dim_v) {
        *reinterpret_cast<float2*>(target + first_col) = float2{rO(row, col), rO(row, col + 1)};
      }
    }
    if (int(get<1>(cO(row, 0))) == 0) {  // one of the threads that hold the row
      *split_sum(params, split, places.at(place)) = {rBases(row), rSums(row)};
    }
  }
}

}  // namespace cute_attention::sm80
