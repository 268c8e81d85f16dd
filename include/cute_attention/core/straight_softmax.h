// core/straight_softmax.h: the online softmax of online_softmax.h with exact maxima and without a branch,
// for kernels whose warps have all keys of a row.
//
// An exponential occupies the MUFU for 8 cycles. The maximum of the next row, the factors of the output,
// sums and conversions find room beside them if no vote and no branch stands before (on an H200 a vote
// before the exponentials costs a twentieth of the forward). So every tile has the exact maximum as its
// reference, and always scales what came before: the time does not depend on the scores. Rows whose base
// is unusual are found afterwards, and computed again from their scores, which are still there.
#pragma once

#include "cute_attention/core/online_softmax.h"

namespace cute_attention {

// The softmax of one thread's rows, as OnlineSoftmax.
template <int kRows, class Warp = DeviceWarp>
struct StraightSoftmax : OnlineSoftmax<kRows, 0, Warp> {
  using Online = OnlineSoftmax<kRows, 0, Warp>;
  using typename Online::Rows;
  using Online::Online;

  // Raises the references to the maxima of a tile of scores (ROWS, COLS). Gives the bases (ROWS) of its
  // exponents, and the factors (ROWS) by which the output so far must be multiplied.
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

  // The probabilities (ROWS, COLS) of scores (ROWS, COLS), and this thread's sums (ROWS) of them.
  //   kChains  sums of a row that are independent until the end
  template <int kChains, class Scores, class Probabilities>
  CUTE_HOST_DEVICE void exponentiate(Scores const& scores, Rows const& bases,
                                     Probabilities&& probabilities, Rows& sums) const {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    CUTE_STATIC_ASSERT_V(shape(scores) == shape(probabilities));
    Rows chains[kChains];
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const value = exp2f(scores(row, col) * this->scale_log2 - bases(row));
        float& sum = chains[col % kChains](row);
        sum = col < kChains ? value : sum + value;
        probabilities(row, col) = value;
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sums(row) = chains[0](row);
      CUTE_UNROLL
      for (int chain = 1; chain < kChains; ++chain) {
        sums(row) += chains[chain](row);
      }
    }
  }

  // Whether a base (ROWS) of the warp is unusual. Then probabilities relative to it cannot be used, but
  // those of the scores that lower() leaves.
  CUTE_HOST_DEVICE static bool any_unusual(Rows const& bases) {
    bool unusual = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      unusual |= !Online::is_usual(bases(row));
    }
    return Warp::any(unusual);
  }
  using Online::lower;

  // Adds the sums (ROWS) of a tile.
  CUTE_HOST_DEVICE void add(Rows const& sums) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      this->row_sum(row) += sums(row);
    }
  }
};

}  // namespace cute_attention
