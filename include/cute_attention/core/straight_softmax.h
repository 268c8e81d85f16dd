// core/straight_softmax.h: the softmax of online_softmax.h with exact maxima and without a branch
// before the exponentials, for kernels in which a warp has all keys of its rows.
//
// Nothing can be scheduled across a branch. Without one, the maximum of the second row, the factors
// of the output, sums and conversions run beside the exponentials, of which a warp starts one every
// 8 cycles. So each tile raises the references to the exact maxima, and what came before is always
// multiplied by its factors: the time does not depend on the scores. Rows whose base is no number
// to compute with are looked for after the exponentials, and their tile is computed again from the
// scores, which are still there.
//
// A tile takes raise(), exponentiate() and add(). In between, where any_unusual(), lower() changes
// the scores and the bases, and exponentiate() replaces the first probabilities and sums.
#pragma once

#include "cute_attention/core/online_softmax.h"

namespace cute_attention {

// The softmax of one thread's rows. `scale` must be positive, as for OnlineSoftmax.
template <int kRows, class Warp = DeviceWarp>
struct StraightSoftmax : private OnlineSoftmax<kRows, 0, Warp> {
  using Online = OnlineSoftmax<kRows, 0, Warp>;
  using Online::bases;
  using Online::finish;
  using Online::lower;
  using Online::Online;
  using Online::sums;
  using typename Online::Rows;

  // Raises the references to the maxima of a tile of scores (ROWS, COLS), and scales the sums so
  // far. Gives the bases (ROWS) of the tile's exponents, and the factors (ROWS) by which the output
  // so far must be multiplied.
  template <class Scores>
  CUTE_HOST_DEVICE void raise(Scores const& scores, Rows& bases, Rows& factors) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const old = this->reference(row), old_base = old * this->scale_log2;
      float const maximum = reduce_row_threads<Warp>(column_maximum<2>(scores, row), MaxOp{});
      this->reference(row) = fmaxf(old, maximum);
      bases(row) = this->reference(row) * this->scale_log2;
      float const rise = this->rise(row, old, old_base, bases(row));
      factors(row) = this->reference(row) > old ? exp2f(-rise) : 1.f;
      this->row_sum(row) *= factors(row);
    }
  }

  // Gives the probabilities (ROWS, COLS) of a tile of scores (ROWS, COLS) relative to the bases
  // (ROWS), and this thread's sums (ROWS) of them.
  template <class Scores, class Probabilities>
  CUTE_HOST_DEVICE void exponentiate(Scores const& scores, Rows const& bases,
                                     Probabilities&& probabilities, Rows& sums) const {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    CUTE_STATIC_ASSERT_V(shape(scores) == shape(probabilities));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const value = exp2f(scores(row, col) * this->scale_log2 - bases(row));
        sums(row) = col == 0 ? value : sums(row) + value;
        probabilities(row, col) = value;
      }
    }
  }

  // Whether a row of the warp has a base (ROWS) that is no number to compute with, so that its
  // probabilities cannot be used. All threads of the warp get the same answer.
  CUTE_HOST_DEVICE static bool any_unusual(Rows const& bases) {
    bool unusual = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      unusual |= !Online::is_usual(bases(row));
    }
    return Warp::any(unusual);
  }

  // Adds the sums (ROWS) of a tile.
  CUTE_HOST_DEVICE void add(Rows const& sums) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      this->row_sum(row) += sums(row);
    }
  }
};

}  // namespace cute_attention
