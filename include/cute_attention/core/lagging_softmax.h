// core/lagging_softmax.h: softmax over tiles of scores that arrive one after the other, for kernels
// whose warps have all keys of a row.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); in base 2, with the
// scale folded into the exponent: exp(scale * (s - max)) = exp2(scale_log2 * s - base), one FFMA and
// one MUFU a score.
//
// The exponents of a row are relative to its `base`, which lags behind the row's maximum: it rises
// only where an exponent is too large.
//
//   range     16-bit probabilities must hold the ratio: at most 2^14.
//   accuracy  the largest probability is 1 if base belongs to it, and is rounded to 16 bits if it
//             exceeds it, while the sum that it is divided by is not. That shows where this one
//             probability is a large part of the sum. So an exponent may be as large as the
//             logarithm of the sum so far.
//
// A row of many similar scores thus keeps the base of its first tile, a row with few large ones has
// its exact maximum. Each thread compares its own exponents with its own part of the sum, so that a
// tile that raises nothing needs one vote, no maximum of a row and no factor.
#pragma once

#include <climits>

#include "cute_attention/core/online_softmax.h"

namespace cute_attention {

// The softmax of one thread's rows. `scale` must be positive, and scale * log2(e) * score finite or
// -infinity: such a score has probability 0, and a row that has seen nothing else has output 0. A
// score that is NaN makes its own row NaN and no other.
//
// kMostLag: no exponent exceeds it. With 0 the base is the exact maximum.
template <int kRows, int kMostLag = 14, class Warp = DeviceWarp>
struct LaggingSoftmax {
  using Rows = decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kRows>>{}));

  Rows base;          // the same in all threads of a row
  Rows row_sum;       // this thread's part of the sum of exp2(scale_log2 * score - base)
  int limits[kRows];  // the bits of the largest exponent that does not raise the base; kUnseen
                      // before the first score that is not hidden
  int peaks[kRows];   // the bits of this thread's largest exponent, or of any if none is positive
  float scale_log2;   // scale * log2(e)

  static constexpr int kUnseen = INT_MIN;

  CUTE_HOST_DEVICE explicit LaggingSoftmax(float scale) : scale_log2(scale * float(M_LOG2E)) {
    cute::clear(base);
    cute::clear(row_sum);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      limits[row] = kUnseen;
      peaks[row] = 0;
    }
  }

  // Turns the scores (ROWS, COLS) of a tile into exponents.
  template <class Scores>
  CUTE_HOST_DEVICE void exponents(Scores&& scores) const {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        scores(row, col) = scores(row, col) * scale_log2 - base(row);
      }
    }
  }

  // The probabilities (ROWS, COLS) of exponents (ROWS, COLS), and this thread's sums of them.
  // Returns whether they cannot be used because raise() has to come first; the warp agrees.
  //   kChains  sums of a row that are independent until the end
  template <int kChains, class Exponents, class Probabilities>
  CUTE_HOST_DEVICE bool exponentiate(Exponents const& exponents, Probabilities&& probabilities,
                                     Rows& sums) {
    using namespace cute;
    Rows chains[kChains];
    CUTE_UNROLL
    for (int col = 0; col < size<1>(exponents); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const value = exp2f(exponents(row, col));
        chains[col % kChains](row) = col < kChains ? value : chains[col % kChains](row) + value;
        probabilities(row, col) = value;
      }
    }
    bool exceeds = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sums(row) = chains[0](row);
      CUTE_UNROLL
      for (int chain = 1; chain < kChains; ++chain) {
        sums(row) += chains[chain](row);
      }
      peaks[row] = peak(exponents, row);
      exceeds |= peaks[row] > limits[row];
    }
    return Warp::any(exceeds);
  }

  // Raises the base of each row that has an exponent above its limit to the row's maximum, and
  // lowers its exponents (ROWS, COLS). The output so far must be multiplied by `factors` (ROWS).
  template <class Scores>
  CUTE_HOST_DEVICE void raise(Scores&& exponents, Rows& factors) {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const largest = reduce_row_threads<Warp>(column_maximum<4>(exponents, row), MaxOp{});
      bool const seen = limits[row] != kUnseen;
      float const exceeds =
          reduce_row_threads<Warp>(peaks[row] > limits[row] ? 1.f : 0.f, MaxOp{});
      bool const grows = (!seen || exceeds != 0.f) && largest != -INFINITY;
      float const raised = grows ? base(row) + largest : base(row);
      float const rise = raised - base(row);
      base(row) = raised;
      factors(row) = grows && seen ? exp2f(-rise) : 1.f;
      row_sum(row) *= factors(row);
      limits[row] = grows ? 0 : limits[row];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(exponents); ++col) {
        exponents(row, col) -= rise;
      }
    }
  }

  // Adds the sums of a tile. 
  CUTE_HOST_DEVICE void add(Rows const& sums) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      row_sum(row) += sums(row);
    }
  }

  // The limits of the next tile's exponents, from the sums so far.
  CUTE_HOST_DEVICE void set_limits() {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const lag =
          kMostLag == 0 ? 0.f : fminf(fmaxf(log2f(row_sum(row)), 0.f), float(kMostLag));
      limits[row] = limits[row] == kUnseen ? kUnseen : bits(lag);
    }
  }

  // After the last tile: the sums (ROWS) of exp2(scale_log2 * score - base), and the bases (ROWS)
  // that they and the output are relative to. A row without keys has the sum 0 and the base
  // -infinity.
  CUTE_HOST_DEVICE Rows sums() const {
    Rows sums;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sums(row) = reduce_row_threads<Warp>(row_sum(row), SumOp{});
    }
    return sums;
  }
  CUTE_HOST_DEVICE Rows bases() const {
    Rows bases;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      bases(row) = limits[row] == kUnseen ? -INFINITY : base(row);
    }
    return bases;
  }

  // After the last tile. Returns the factors (ROWS) that normalise the output, and gives the LSE
  // (ROWS) in natural logarithm. A row without keys has factor 0 and LSE -infinity.
  CUTE_HOST_DEVICE Rows finish(Rows& lse) const {
    Rows const sums = this->sums();
    Rows factors;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      bool const empty = sums(row) == 0.f;
      factors(row) = empty ? 0.f : 1.f / sums(row);
      lse(row) = empty ? -INFINITY : (base(row) + log2f(sums(row))) * float(M_LN2);
    }
    return factors;
  }

 private:
  // The largest of the bits of this thread's exponents (ROWS, COLS) of a row.
  template <class Scores>
  CUTE_HOST_DEVICE static int peak(Scores const& exponents, int row) {
    using namespace cute;
    int chains[2] = {bits(exponents(row, 0)), bits(exponents(row, 1))};
    CUTE_UNROLL
    for (int col = 2; col < size<1>(exponents); col += 2) {
      int& chain = chains[col / 2 % 2];
      chain = Warp::max3(chain, bits(exponents(row, col)), bits(exponents(row, col + 1)));
    }
    return Warp::max3(chains[0], chains[1], chains[1]);
  }

  CUTE_HOST_DEVICE static int bits(float value) { return cutlass::platform::bit_cast<int>(value); }
};

}  // namespace cute_attention
