// core/online_softmax.h: softmax over tiles of scores that arrive one after the other.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); in base 2, with the
// scale folded into the exponent: exp(scale * (s - max)) = exp2(scale_log2 * s - scale_log2 * max),
// one FFMA and one MUFU a score.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"

namespace cute_attention {

struct MaxOp {
  CUTE_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOp {
  CUTE_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Combines the values of the threads that share a row; all of them get the result.
template <class Op>
CUTE_DEVICE float reduce_row_threads(float value, Op const& op) {
  CUTE_UNROLL
  for (int offset = kThreadsPerRow / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// One thread's rows. `scale` must be positive: the maximum is taken before it.
template <int kRows>
struct OnlineSoftmax {
  using Rows = decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kRows>>{}));

  Rows row_max;      // over all keys so far, of unscaled scores; the same in all threads of a row
  Rows row_sum;      // this thread's part of the sum of exp(scale * (score - row_max))
  Rows reference;    // what exponents are relative to: row_max in base 2, finite where no key was
                     // visible so far
  float scale_log2;  // scale * log2(e)

  CUTE_DEVICE explicit OnlineSoftmax(float scale) : scale_log2(scale * float(M_LOG2E)) {
    cute::fill(row_max, -INFINITY);
    cute::clear(row_sum);
  }

  // Takes a tile's scores (ROWS, COLS) into the maximum. Returns the factors (ROWS) that the output
  // so far must be multiplied by. kMasked: a row may hold nothing but -infinity, now and before.
  template <bool kMasked, class Scores>
  CUTE_DEVICE Rows update_max(Scores const& scores) {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    Rows factors;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float tile_max = scores(row, 0);
      CUTE_UNROLL
      for (int col = 1; col < size<1>(scores); ++col) {
        tile_max = fmaxf(tile_max, scores(row, col));
      }
      float const new_max = fmaxf(row_max(row), reduce_row_threads(tile_max, MaxOp{}));
      // exp2(-inf - reference) must be 0, not NaN.
      reference(row) = kMasked && new_max == -INFINITY ? 0.f : new_max * scale_log2;
      factors(row) = exp2f(row_max(row) * scale_log2 - reference(row));
      row_max(row) = new_max;
      row_sum(row) *= factors(row);
    }
    return factors;
  }

  // Turns scores (ROWS, COLS), a tile's or a part of its columns, into probabilities relative to
  // the maximum.
  template <class Scores>
  CUTE_DEVICE void exponentiate(Scores&& scores) {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) = exp2f(scores(row, col) * scale_log2 - reference(row));
        row_sum(row) += scores(row, col);
      }
    }
  }

  // After the last tile. Returns the factors (ROWS) that normalise the output, and replaces row_max
  // by the LSE in natural logarithm. A row without keys has factor 0 and LSE -infinity.
  CUTE_DEVICE Rows finish() {
    Rows factors;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const sum = reduce_row_threads(row_sum(row), SumOp{});
      bool const empty = sum == 0.f;
      factors(row) = empty ? 0.f : 1.f / sum;
      row_max(row) = empty ? -INFINITY : (row_max(row) * scale_log2 + log2f(sum)) * float(M_LN2);
    }
    return factors;
  }
};

// Multiplies each row of an output accumulator (ROWS, COLS) by its factor.
template <class Output, class Rows>
CUTE_DEVICE void scale_rows(Output& output, Rows const& factors) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(output) == size(factors));
  CUTE_UNROLL
  for (int row = 0; row < size<0>(output); ++row) {
    CUTE_UNROLL
    for (int col = 0; col < size<1>(output); ++col) {
      output(row, col) *= factors(row);
    }
  }
}

}  // namespace cute_attention
