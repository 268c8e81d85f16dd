// core/online_softmax.h: softmax over tiles of scores that arrive one after the other.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); in base 2, with the
// scale folded into the exponent: exp(scale * (s - max)) = exp2(scale_log2 * s - scale_log2 * max),
// one FFMA and one MUFU a score.
//
// Exponents of a row are relative to its `reference`, a maximum of its scores so far. A larger
// score replaces it only where that matters:
//
//   range     16-bit probabilities must hold the ratio: at most 2^14.
//   accuracy  the largest probability is exactly 1 if it is the reference, and rounded to 16 bits
//             if it exceeds it, while the sum that it is divided by is not. That shows where this
//             one probability is a large part of the sum. So the reference may be exceeded by a
//             factor as large as the sum so far.
//
// A row of many similar scores thus keeps the reference of its first tile, a row with few large
// ones has the exact maximum. Either way the result is right for all scores below +infinity,
// however large or hidden: a score of -infinity has probability 0, and a row that has seen nothing
// else has output 0. A score that is NaN makes its own row NaN and no other.
#pragma once

#include <cutlass/platform/platform.h>

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/warp.h"

namespace cute_attention {

struct MaxOp {
  CUTE_HOST_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct MinOp {
  CUTE_HOST_DEVICE float operator()(float a, float b) const { return fminf(a, b); }
};
struct SumOp {
  CUTE_HOST_DEVICE float operator()(float a, float b) const { return a + b; }
};

// For OnlineSoftmax in a warp that has all keys of its rows.
struct NothingToCombine {
  template <class Rows, class Op>
  CUTE_HOST_DEVICE void operator()(Rows&, Op const&) const {}
};

// Combines the values of the threads that share a row; all of them get the result.
template <class Warp, class Op>
CUTE_HOST_DEVICE float reduce_row_threads(float value, Op const& op) {
  CUTE_UNROLL
  for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
    value = op(value, Warp::shuffle_xor(value, offset));
  }
  return value;
}

// The maximum of one row of scores (ROWS, COLS) of this thread in kChains independent chains: a
// dependent chain of one would wait for the latency of each operation.
template <int kChains, class Scores>
CUTE_HOST_DEVICE float column_maximum(Scores const& scores, int row) {
  using namespace cute;
  float partial[kChains];
  CUTE_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    partial[chain] = scores(row, chain);
  }
  CUTE_UNROLL
  for (int col = kChains; col < size<1>(scores); ++col) {
    partial[col % kChains] = fmaxf(partial[col % kChains], scores(row, col));
  }
  CUTE_UNROLL
  for (int chain = 1; chain < kChains; ++chain) {
    partial[0] = fmaxf(partial[0], partial[chain]);
  }
  return partial[0];
}

// The softmax of one thread's rows. `scale` must be positive: maxima are taken before scores are
// multiplied by it.
//
// kMostLag: a row's reference always rises where a score exceeds it by more than this, in base 2.
// With 0 it is the exact maximum.
template <int kRows, int kMostLag = 14, class Warp = DeviceWarp>
struct OnlineSoftmax {
  using Rows = decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kRows>>{}));
  // A reference in base 2, scale_log2 * reference, is rounded, and so are all probabilities of the
  // row, in the same direction. Beyond this its rounding would show beside that of a 16-bit
  // probability.
  static constexpr float kLargest = 0x1p13f;

  Rows reference;    // an unscaled score, the same in all threads of a row; -infinity before the
                     // first that is more
  Rows row_sum;      // this thread's part of the sum of exp(scale * (score - reference))
  float scale_log2;  // scale * log2(e)

  CUTE_HOST_DEVICE explicit OnlineSoftmax(float scale) : scale_log2(scale * float(M_LOG2E)) {
    cute::fill(reference, -INFINITY);
    cute::clear(row_sum);
  }

  // Turns the scores (ROWS, COLS) of a tile into probabilities. Returns whether the output so far
  // must be multiplied by `factors` (ROWS); the warp agrees.
  //   combine(rows, op)  combines numbers (ROWS) with those of other warps that have keys of the
  //                      same rows; only with the exact maximum
  //   kMasked            whether some scores may be hidden
  //   kChains            sums of a row that are independent until the end
  template <bool kMasked, int kChains, class Scores, class Combine = NothingToCombine>
  CUTE_HOST_DEVICE bool take(Scores&& scores, Rows& factors, Combine const& combine = {}) {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    Rows maxima, base;
    maximum<kMasked>(scores, maxima);
    combine(maxima, MaxOp{});
    bool grows = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      base(row) = reference(row) * scale_log2;
      grows |= growth(maxima(row), row) > lag(row);
    }
    bool const rescale = Warp::any(grows);
    if (rescale) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        bool const grown = growth(maxima(row), row) > row_lag(row);
        float const old = reference(row), old_base = base(row);
        reference(row) = grown ? maxima(row) : old;
        base(row) = reference(row) * scale_log2;
        factors(row) = grown ? exp2f(-rise(row, old, old_base, base(row))) : 1.f;
        row_sum(row) *= factors(row);
      }
    }
    bool unusual = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      unusual |= !is_usual(base(row));
    }
    if (Warp::any(unusual)) {
      lower(scores, base);
    }
    exponentiate<kChains>(scores, base);
    return rescale;
  }

  // After the last tile: the sums (ROWS) of exp2(scale_log2 * score - base), and the bases (ROWS)
  // that they and the output are relative to. A row without keys has the sum 0.
  // combine(rows, op) as for take().
  template <class Combine = NothingToCombine>
  CUTE_HOST_DEVICE Rows sums(Combine const& combine = {}) const {
    Rows sums;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sums(row) = reduce_row_threads<Warp>(row_sum(row), SumOp{});
    }
    combine(sums, SumOp{});
    return sums;
  }
  CUTE_HOST_DEVICE Rows bases() const {
    Rows bases;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      bases(row) = reference(row) * scale_log2;
    }
    return bases;
  }

  // After the last tile. Returns the factors (ROWS) that normalise the output, and gives the LSE
  // (ROWS) in natural logarithm. A row without keys has factor 0 and LSE -infinity.
  // combine(rows, op) as for take().
  template <class Combine = NothingToCombine>
  CUTE_HOST_DEVICE Rows finish(Rows& lse, Combine const& combine = {}) const {
    Rows const sums = this->sums(combine);
    Rows factors;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      bool const empty = sums(row) == 0.f;
      factors(row) = empty ? 0.f : 1.f / sums(row);
      lse(row) =
          empty ? -INFINITY : (reference(row) * scale_log2 + log2f(sums(row))) * float(M_LN2);
    }
    return factors;
  }

 protected:
  CUTE_HOST_DEVICE static bool is_usual(float base) { return fabsf(base) <= kLargest; }

  // By how much, in base 2, a row's reference has risen from `old`. The probabilities so far, and
  // those to come, are relative to the row's base; or, where lower() changes the scores, to its
  // reference.
  CUTE_HOST_DEVICE float rise(int row, float old, float old_base, float base) const {
    return is_usual(old_base) && is_usual(base) ? base - old_base
                                                : (reference(row) - old) * scale_log2;
  }

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

  // Turns scores (ROWS, COLS) into probabilities relative to `base` (ROWS), and adds them up.
  template <int kChains, class Scores>
  CUTE_HOST_DEVICE void exponentiate(Scores&& scores, Rows const& base) {
    using namespace cute;
    Rows sums[kChains];
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const value = exp2f(scores(row, col) * scale_log2 - base(row));
        sums[col % kChains](row) = col < kChains ? value : sums[col % kChains](row) + value;
        scores(row, col) = value;
      }
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int chain = 1; chain < kChains; ++chain) {
        sums[0](row) += sums[chain](row);
      }
      row_sum(row) += sums[0](row);
    }
  }

  CUTE_HOST_DEVICE static int bits(float value) { return cutlass::platform::bit_cast<int>(value); }
  CUTE_HOST_DEVICE static float number(int bits) {
    return cutlass::platform::bit_cast<float>(bits);
  }

  // For rows whose base in base 2 is no number to compute with. exp2(-inf - base) must be 0 where
  // all scores are -infinity, not NaN. And a large reference is subtracted from the scores
  // themselves, so that the largest become exactly 0.
  template <class Scores>
  CUTE_HOST_DEVICE void lower(Scores&& scores, Rows& base) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      bool const usual = is_usual(base(row));
      float const seen = usual || reference(row) == -INFINITY ? 0.f : reference(row);
      base(row) = usual ? base(row) : 0.f;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) -= seen;
      }
    }
  }
};

// Multiplies each row of an output accumulator (ROWS, COLS) by its factor.
template <class Output, class Rows>
CUTE_HOST_DEVICE void scale_rows(Output& output, Rows const& factors) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(output) == size(factors));  // ROWS
  CUTE_UNROLL
  for (int row = 0; row < size<0>(output); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); ++col) {
      output(row, col) *= factors(row);
    }
  }
}

}  // namespace cute_attention
