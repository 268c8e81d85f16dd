// core/online_softmax.h: the softmax of row_softmax.h with a reference that lags behind the
// maximum.
//
// A larger score replaces the reference of its row only where that matters:
//
//   range     16-bit probabilities must hold the ratio: at most 2^14.
//   accuracy  the largest probability is exactly 1 if it is the reference, and rounded to 16 bits
//             if it exceeds it, while the sum that it is divided by is not. That shows where this
//             one probability is a large part of the sum. So the reference may be exceeded by a
//             factor as large as the sum so far.
//
// A row of many similar scores thus keeps the reference of its first tile, a row with few large
// ones has the exact maximum.
#pragma once

#include <cutlass/platform/platform.h>

#include "cute_attention/core/row_softmax.h"

namespace cute_attention {

// For scores that lack nothing.
struct NoOffsets {};

// kMostLag: a row's reference always rises where a score exceeds it by more than this, in base 2.
// With 0 it is the exact maximum.
template <int kRows, int kMostLag = 14, class Warp = DeviceWarp>
struct OnlineSoftmax : RowSoftmax<kRows, Warp> {
  using Base = RowSoftmax<kRows, Warp>;
  using Base::Base, Base::reference, Base::row_sum, Base::scale_log2;
  using typename Base::Rows;

  // Turns the scores (ROWS, COLS) of a tile into probabilities. Returns whether the output so far
  // must be multiplied by `factors` (ROWS); the warp agrees.
  //   combine(rows, op)  combines numbers (ROWS) with those of other warps that have keys of the
  //                      same rows; only with the exact maximum
  //   offsets            (ROWS), if any: what is still to be added to the scores of each row
  //   kMasked            whether some scores may be hidden
  template <bool kMasked, class Scores, class Combine = NothingToCombine, class Offsets = NoOffsets>
  CUTE_HOST_DEVICE bool take(Scores&& scores, Rows& factors, Combine const& combine = {},
                             Offsets const& offsets = {}) {
    constexpr bool kHasOffsets = !cutlass::platform::is_same<Offsets, NoOffsets>::value;
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    Rows maxima, base;
    maximum<kMasked>(scores, maxima);
    if constexpr (kHasOffsets) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        maxima(row) += offsets(row);
      }
    }
    combine(maxima, MaxOp{});
    bool grows = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      base(row) = this->base_of(reference(row));
      grows |= growth(maxima(row), row) > lag(row);
    }
    bool const rescale = Warp::any(grows);
    if (rescale) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        bool const grown = growth(maxima(row), row) > row_lag(row);
        float const old = reference(row), old_base = base(row);
        reference(row) = grown ? maxima(row) : old;
        base(row) = this->base_of(reference(row));
        factors(row) = grown ? exp2f(-this->rise(row, old, old_base, base(row))) : 1.f;
        row_sum(row) *= factors(row);
      }
    }
    if constexpr (kHasOffsets) {
      Rows const shifted = this->shifted(base, offsets);
      if (this->any_unusual(base)) {
        this->lower(scores, base, shifted, offsets);
      } else {
        base = shifted;
      }
    } else if (this->any_unusual(base)) {
      this->lower(scores, base);
    }
    Rows sums;
    this->exponentiate(scores, base, scores, sums);
    this->add(sums);
    return rescale;
  }

 private:
  // By how much, in base 2, a row's maximum exceeds its reference. NaN where there is neither.
  CUTE_HOST_DEVICE float growth(float maximum, int row) const {
    return (maximum - reference(row)) * scale_log2;
  }

  // By how much it may: with this thread's part of the sum, and with the smallest of all parts.
  CUTE_HOST_DEVICE float lag(int row) const {
    return kMostLag == 0 ? 0.f : fminf(fmaxf(log2f(row_sum(row)), 0.f), float(kMostLag));
  }
  CUTE_HOST_DEVICE float row_lag(int row) const {
    return kMostLag == 0 ? 0.f : reduce_row_threads<Warp>(lag(row), MinOp{});
  }

  // The maxima (ROWS) of scores (ROWS, COLS) in all threads of a row.
  //
  // As integers the bits of floats from 0 on are in the same order, those of negative ones in the
  // opposite order, and one instruction compares three. So a thread's maximum has the largest of
  // the bits, or, if that is negative, the smallest. Hidden scores make that likely: then floats
  // are compared.
  template <bool kMasked, class Scores>
  CUTE_HOST_DEVICE void maximum(Scores const& scores, Rows& maxima) const {
    if constexpr (kMasked) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        maxima(row) = column_maximum<4>(scores, row);
      }
    } else {
      int most[kRows];
      bool negative = false;
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        most[row] = extreme_bits(scores, row, &Warp::max3);
        negative |= most[row] < 0;
      }
      if (__builtin_expect(Warp::any(negative), false)) {
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
          int const least = extreme_bits(scores, row, &Warp::min3);
          most[row] = most[row] < 0 ? least : most[row];
        }
      }
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        maxima(row) = number(most[row]);
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      maxima(row) = reduce_row_threads<Warp>(maxima(row), MaxOp{});
    }
  }

  // The largest or smallest of the bits, as integers, of one row of scores (ROWS, COLS) of this
  // thread. extreme(a, b, c) chooses one of three.
  template <class Scores, class Extreme>
  CUTE_HOST_DEVICE static int extreme_bits(Scores const& scores, int row, Extreme const& extreme) {
    using namespace cute;
    int chains[2] = {bits(scores(row, 0)), bits(scores(row, 1))};
    CUTE_UNROLL
    for (int col = 2; col < size<1>(scores); col += 2) {
      int& chain = chains[col / 2 % 2];
      chain = extreme(chain, bits(scores(row, col)), bits(scores(row, col + 1)));
    }
    return extreme(chains[0], chains[1], chains[1]);
  }

  CUTE_HOST_DEVICE static int bits(float value) { return cutlass::platform::bit_cast<int>(value); }
  CUTE_HOST_DEVICE static float number(int bits) {
    return cutlass::platform::bit_cast<float>(bits);
  }
};

}  // namespace cute_attention
