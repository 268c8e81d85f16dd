// core/row_softmax.h: what the softmaxes of the kernels have in common: the numbers of each row,
// the exponentials of a tile, and how a row ends.
//
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); in base 2, with the
// scale folded into the exponent: exp(scale * (s - max)) = exp2(scale_log2 * s - scale_log2 * max),
// one FFMA and one MUFU a score.
//
// Exponents of a row are relative to its `reference`, a maximum of its scores so far. Which one
// says online_softmax.h or straight_softmax.h. The result is right for all scores below +infinity,
// however large or hidden: a score of -infinity has probability 0, and a row that has seen nothing
// else has output 0. A score that is NaN makes its own row NaN and no other.
#pragma once

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

// For a warp that has all keys of its rows.
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
template <int kRows, class Warp>
struct RowSoftmax {
  using Rows = decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kRows>>{}));
  // A reference in base 2, scale_log2 * reference, is rounded, and so are all probabilities of the
  // row, in the same direction. Beyond this its rounding would show beside that of a 16-bit
  // probability.
  static constexpr float kLargest = 0x1p13f;

  Rows reference;    // an unscaled score, the same in all threads of a row; -infinity before the
                     // first that is more
  Rows row_sum;      // this thread's part of the sum of exp(scale * (score - reference))
  float scale_log2;  // scale * log2(e)

  CUTE_HOST_DEVICE explicit RowSoftmax(float scale) : scale_log2(scale * float(M_LOG2E)) {
    cute::fill(reference, -INFINITY);
    cute::clear(row_sum);
  }

  // After the last tile: the sums (ROWS) of exp2(scale_log2 * score - base), and the bases (ROWS)
  // that they and the output are relative to. A row without keys has the sum 0.
  // combine(rows, op) combines numbers (ROWS) with those of other warps that have keys of the same
  // rows.
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
      bases(row) = base_of(reference(row));
    }
    return bases;
  }

  // After the last tile. Returns the factors (ROWS) that normalise the output, and gives the LSE
  // (ROWS) in natural logarithm. A row without keys has factor 0 and LSE -infinity.
  // combine(rows, op) as for sums().
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

  // A reference (an unscaled score) in base 2, rounded, as probabilities are relative to it. ptxas
  // would contract the product with a difference of two bases into an FFMA, in which one of them is
  // not rounded, and not for all rows of a thread alike: the bits of a row would depend on its
  // place in the tile.
  CUTE_HOST_DEVICE float base_of(float reference) const {
#ifdef __CUDA_ARCH__
    return __fmul_rn(reference, scale_log2);
#else
    return reference * scale_log2;
#endif
  }

  // By how much, in base 2, a row's reference has risen from `old`. The probabilities so far, and
  // those to come, are relative to the row's base; or, where lower() changes the scores, to its
  // reference.
  CUTE_HOST_DEVICE float rise(int row, float old, float old_base, float base) const {
    return is_usual(old_base) && is_usual(base) ? base - old_base
                                                : (reference(row) - old) * scale_log2;
  }

  CUTE_HOST_DEVICE float probability(float score, float base) const {
    return exp2f(score * scale_log2 - base);
  }

  // Gives the probabilities (ROWS, COLS) of a tile of scores (ROWS, COLS) relative to the bases
  // (ROWS), and this thread's sums (ROWS) of them. Probabilities may take the place of the scores.
  //   end_block(k)  is called once those of columns 4 k to 4 k + 3, a K block of an A operand
  //                 (accumulator.h), are there
  template <class Scores, class Probabilities, class EndBlock>
  CUTE_HOST_DEVICE void exponentiate(Scores const& scores, Rows const& bases,
                                     Probabilities&& probabilities, Rows& sums,
                                     EndBlock const& end_block) const {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    CUTE_STATIC_ASSERT_V(shape(scores) == shape(probabilities));
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const value = probability(scores(row, col), bases(row));
        sums(row) = col == 0 ? value : sums(row) + value;
        probabilities(row, col) = value;
      }
      if (col % 4 == 3) {
        end_block(col / 4);
      }
    }
  }
  template <class Scores, class Probabilities>
  CUTE_HOST_DEVICE void exponentiate(Scores const& scores, Rows const& bases,
                                     Probabilities&& probabilities, Rows& sums) const {
    exponentiate(scores, bases, probabilities, sums, [](int) {});
  }

  // As exponentiate(), but one row after the other, and with two sums of each row: an addition
  // waits for the one before the last, not for the last. The probabilities have the same bits, the
  // sums may not.
  template <class Scores, class Probabilities>
  CUTE_HOST_DEVICE void exponentiate_rows(Scores const& scores, Rows const& bases,
                                          Probabilities&& probabilities, Rows& sums) const {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    CUTE_STATIC_ASSERT_V(shape(scores) == shape(probabilities));
    static_assert(decltype(size<1>(scores))::value >= 2, "two sums of a row");
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float partial[2];
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        float const value = probability(scores(row, col), bases(row));
        partial[col % 2] = col < 2 ? value : partial[col % 2] + value;
        probabilities(row, col) = value;
      }
      sums(row) = partial[0] + partial[1];
    }
  }

  // Adds the sums (ROWS) of a tile.
  CUTE_HOST_DEVICE void add(Rows const& sums) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      row_sum(row) += sums(row);
    }
  }

  // Whether a row of the warp has a base (ROWS) that is no number to compute with, so that its
  // probabilities cannot be used. All threads of the warp get the same answer.
  CUTE_HOST_DEVICE static bool any_unusual(Rows const& bases) {
    bool unusual = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      unusual |= !is_usual(bases(row));
    }
    return Warp::any(unusual);
  }

  // The maxima (ROWS) of this thread's scores (ROWS, COLS) of a tile.
  template <class Scores>
  CUTE_HOST_DEVICE static Rows maxima(Scores const& scores) {
    Rows maxima;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      maxima(row) = column_maximum<2>(scores, row);
    }
    return maxima;
  }

  // The bases (ROWS) of the exponents of scores to which `offsets` (ROWS) are still to be added.
  CUTE_HOST_DEVICE Rows shifted(Rows const& bases, Rows const& offsets) const {
    Rows shifted;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      shifted(row) = fmaf(-offsets(row), scale_log2, bases(row));
    }
    return shifted;
  }

  // For rows whose base in base 2 is no number to compute with. exp2(-inf - base) must be 0 where
  // all scores are -infinity, not NaN. And a large reference is subtracted from the scores
  // themselves, so that the largest become exactly 0.
  //   shifted, offsets  (ROWS)  the bases as shifted() makes them, and what the scores lack
  template <class Scores>
  CUTE_HOST_DEVICE void lower(Scores&& scores, Rows& base, Rows const& shifted,
                              Rows const& offsets) const {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      bool const usual = is_usual(base(row));
      float const seen = usual || reference(row) == -INFINITY ? 0.f : reference(row) - offsets(row);
      base(row) = usual ? shifted(row) : 0.f;
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        scores(row, col) -= seen;
      }
    }
  }
  template <class Scores>
  CUTE_HOST_DEVICE void lower(Scores&& scores, Rows& base) const {
    Rows none;
    cute::clear(none);
    lower(scores, base, base, none);
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
