// core/straight_softmax.h: the softmax of row_softmax.h with exact maxima and without a branch
// before the exponentials, for kernels in which a warp has all keys of its rows.
//
// Nothing can be scheduled across a branch. Without one, the maximum of the second row, the factors
// of the output, sums and conversions run beside the exponentials, of which a warp starts one every
// 8 cycles. So each tile raises the references to the exact maxima, and what came before is always
// multiplied by its factors: the time does not depend on the scores. Rows whose base is no number
// to compute with are looked for after the exponentials, and their tile is computed again from the
// scores, which are still there.
//
// A tile takes maxima(), raise(), exponentiate() and add(). Before add(), where any_unusual(),
// lower() changes the scores and the bases, and exponentiate() replaces the first probabilities and
// sums.
#pragma once

#include "cute_attention/core/row_softmax.h"

namespace cute_attention {

template <int kRows, class Warp = DeviceWarp>
struct StraightSoftmax : RowSoftmax<kRows, Warp> {
  using Base = RowSoftmax<kRows, Warp>;
  using Base::add, Base::any_unusual, Base::Base, Base::exponentiate, Base::exponentiate_rows,
      Base::lower, Base::maxima, Base::shifted;
  using Base::reference, Base::row_sum, Base::scale_log2;
  using typename Base::Rows;

  // Raises the references to the maxima of a tile, of which each thread of a row has its part
  // (ROWS), and scales the sums so far. Gives the bases (ROWS) of the tile's exponents, and the
  // factors (ROWS) by which the output so far must be multiplied.
  //   kByMinimum  whether a factor that is 1 is found by a minimum, and not by a comparison: fewer
  //               instructions, but not faster in all kernels
  template <bool kByMinimum = false>
  CUTE_HOST_DEVICE void raise(Rows const& maxima, Rows& bases, Rows& factors) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const old = reference(row), old_base = this->base_of(old);
      float const maximum = reduce_row_threads<Warp>(maxima(row), MaxOp{});
      reference(row) = fmaxf(old, maximum);
      bases(row) = this->base_of(reference(row));
      float const rise = this->rise(row, old, old_base, bases(row));
      if constexpr (kByMinimum) {
        // The rise of a row that has seen hidden scores alone is NaN, which a minimum leaves out.
        factors(row) = exp2f(fminf(-rise, 0.f));
      } else {
        factors(row) = reference(row) > old ? exp2f(-rise) : 1.f;
      }
      row_sum(row) *= factors(row);
    }
  }
};

}  // namespace cute_attention
