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

// Combines one row of scores (ROWS, COLS) of this thread in kChains independent chains: a dependent
// chain of one would wait for the latency of each operation.
template <int kChains, class Scores, class Op>
CUTE_DEVICE float reduce_columns(Scores const& scores, int row, Op const& op) {
  using namespace cute;
  float partial[kChains];
  CUTE_UNROLL
  for (int chain = 0; chain < kChains; ++chain) {
    partial[chain] = scores(row, chain);
  }
  CUTE_UNROLL
  for (int col = kChains; col < size<1>(scores); ++col) {
    partial[col % kChains] = op(partial[col % kChains], scores(row, col));
  }
  CUTE_UNROLL
  for (int chain = 1; chain < kChains; ++chain) {
    partial[0] = op(partial[0], partial[chain]);
  }
  return partial[0];
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
  // so far must be multiplied by. A row may hold nothing but -infinity, now and before.
  // combine(maxima) takes the maxima (ROWS) of other warps in, where they have keys of these rows.
  template <class Scores, class Combine>
  CUTE_DEVICE Rows update_max(Scores const& scores, Combine&& combine) {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    Rows maxima;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float tile_max = scores(row, 0);
      CUTE_UNROLL
      for (int col = 1; col < size<1>(scores); ++col) {
        tile_max = fmaxf(tile_max, scores(row, col));
      }
      maxima(row) = reduce_row_threads(tile_max, MaxOp{});
    }
    combine(maxima);
    Rows factors;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const new_max = fmaxf(row_max(row), maxima(row));
      // exp2(-inf - reference) must be 0, not NaN.
      reference(row) = new_max == -INFINITY ? 0.f : new_max * scale_log2;
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

  // Turns scores (ROWS, COLS) of a tile into probabilities relative to the maximum of the tiles
  // before, without looking for their own: exact as long as none exceeds `limit`, as only their
  // ratio to the sum counts. Returns whether that is so for the whole warp; else, as where a row
  // has seen no key yet, nothing but the scores has changed, and they are to be made once more for
  // update_max.
  template <class Scores>
  CUTE_DEVICE bool exponentiate_within(Scores&& scores, float limit) {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    Rows sums;
    clear(sums);
    float total = 0.f;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const old_reference = row_max(row) * scale_log2;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) = exp2f(scores(row, col) * scale_log2 - old_reference);
        sums(row) += scores(row, col);
      }
      total += sums(row);
    }
    bool const within = __all_sync(0xffffffffu, total <= limit);  // false for NaN
    if (within) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        row_sum(row) += sums(row);
      }
    }
    return within;
  }

  // As exponentiate, but returns this thread's part of the tile's sums, for add(). kChains: sums of
  // a row that are independent until the end.
  //
  // The maximum need not know these scores: no probability exceeds its sum, so that outgrown()
  // tells afterwards whether they were too large for it. Then the tile needs catch_up(), or, where
  // lost(), its scores once more. A third of the work is saved where most tiles have outgrown
  // nothing.
  template <int kChains, class Scores>
  CUTE_DEVICE Rows exponentiate_apart(Scores&& scores) {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    // FFMAs of a group wait for the first exponential of the group before: left alone, the compiler
    // puts all of them first, where none of the MUFU's time hides them. `sign` is 0, but only we
    // know.
    constexpr int kGroup = 4;
    int const sign = __float_as_int(scale_log2) >> 31;
    Rows base = reference;
    Rows sums[kChains];
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const value = exp2f(scores(row, col) * scale_log2 - base(row));
        sums[col % kChains](row) = col < kChains ? value : sums[col % kChains](row) + value;
        scores(row, col) = value;
      }
      if (col % kGroup == kGroup - 1) {
        int const nothing = __float_as_int(scores(0, col - kGroup + 1)) & sign;
        CUTE_UNROLL
        for (int row = 0; row < kRows; ++row) {
          base(row) = __int_as_float(__float_as_int(reference(row)) | nothing);
        }
      }
    }
    CUTE_UNROLL
    for (int chain = 1; chain < kChains; ++chain) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        sums[0](row) += sums[chain](row);
      }
    }
    return sums[0];
  }

  CUTE_DEVICE void add(Rows const& sums) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      row_sum(row) += sums(row);
    }
  }

  // Whether some of the warp's `sums` hold more than 16-bit probabilities, and sums of many, can.
  CUTE_DEVICE static bool outgrown(Rows const& sums) { return any_exceeds(sums, 0x1p14f); }
  // Whether some are infinite, or so large that a factor back to 1 would be denormal.
  CUTE_DEVICE static bool lost(Rows const& sums) { return any_exceeds(sums, 0x1p100f); }

  // Raises the maximum by as much as `sums`, which are not lost(), have outgrown it; probabilities
  // (ROWS, COLS) and sums follow. Returns the factors (ROWS) that the output so far must be
  // multiplied by.
  template <class Probabilities>
  CUTE_DEVICE Rows catch_up(Probabilities&& probabilities, Rows& sums) {
    using namespace cute;
    Rows factors;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const growth = fmaxf(log2f(reduce_row_threads(sums(row), MaxOp{})), 0.f);
      row_max(row) += growth / scale_log2;
      float const old_reference = reference(row);
      reference(row) = row_max(row) * scale_log2;
      factors(row) = exp2f(old_reference - reference(row));
      row_sum(row) *= factors(row);
      sums(row) *= factors(row);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(probabilities); ++col) {
        probabilities(row, col) *= factors(row);
      }
    }
    return factors;
  }

  // As update_max, for scores whose exponentiated values stay relative to an older maximum until
  // the true one has grown by more than kLag in base 2. Returns whether the output so far must be
  // multiplied by `factors`; the warp agrees. The result is as exact: values reach 2^kLag instead
  // of 1, and only their ratio to the sum counts.
  template <bool kMasked, class Scores>
  CUTE_DEVICE bool update_max_lazily(Scores const& scores, Rows& factors) {
    using namespace cute;
    constexpr float kLag = 8.f;
    Rows new_max;
    bool grown = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const tile_max = reduce_row_threads(reduce_columns<4>(scores, row, MaxOp{}), MaxOp{});
      new_max(row) = fmaxf(row_max(row), tile_max);
      grown |= (new_max(row) - row_max(row)) * scale_log2 > kLag;
    }
    bool const rescale = __any_sync(0xffffffffu, grown);
    Rows const old_max = row_max;
    if (rescale) {
      row_max = new_max;
    }
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      // exp2(-inf - reference) must be 0, not NaN.
      reference(row) = kMasked && row_max(row) == -INFINITY ? 0.f : row_max(row) * scale_log2;
    }
    if (rescale) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        factors(row) = exp2f(old_max(row) * scale_log2 - reference(row));
        row_sum(row) *= factors(row);
      }
    }
    return rescale;
  }

  CUTE_DEVICE static bool any_exceeds(Rows const& sums, float limit) {
    bool exceeds = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      exceeds |= sums(row) > limit;
    }
    return __any_sync(0xffffffffu, exceeds);
  }

  // After the last tile. Returns the factors (ROWS) that normalise the output, and replaces row_max
  // by the LSE in natural logarithm. A row without keys has factor 0 and LSE -infinity.
  // combine(sums) as for update_max.
  template <class Combine>
  CUTE_DEVICE Rows finish(Combine&& combine) {
    Rows sums;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sums(row) = reduce_row_threads(row_sum(row), SumOp{});
    }
    combine(sums);
    Rows factors;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      bool const empty = sums(row) == 0.f;
      factors(row) = empty ? 0.f : 1.f / sums(row);
      row_max(row) =
          empty ? -INFINITY : (row_max(row) * scale_log2 + log2f(sums(row))) * float(M_LN2);
    }
    return factors;
  }
  CUTE_DEVICE Rows finish() {
    return finish([](Rows&) {});
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
