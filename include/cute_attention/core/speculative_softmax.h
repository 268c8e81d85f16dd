// core/speculative_softmax.h: an online softmax that computes the probabilities of a tile before it
// knows whether they can be used, for kernels whose warps have all keys of a row.
//
// A tile hardly ever raises a reference (online_softmax.h). So attempt() takes the references as they
// are, and finds the largest exponent beside the exponentials: these keep the MUFU busy for 8 cycles
// each, and comparisons use another pipe. If an exponent exceeds what its row allows, settle() raises
// references, from the scores, which are still there, and the attempt is made again.
//
// A probability may be as large as the sum so far. Each thread compares its own probabilities with its
// own part of the sum, so that an attempt needs one vote, no maximum of a row and no factor.
#pragma once

#include <climits>

#include "cute_attention/core/online_softmax.h"

namespace cute_attention {

// The softmax of one thread's rows, as OnlineSoftmax.
template <int kRows, int kMostLag = 14, class Warp = DeviceWarp>
struct SpeculativeSoftmax : OnlineSoftmax<kRows, kMostLag, Warp> {
  using Online = OnlineSoftmax<kRows, kMostLag, Warp>;
  using typename Online::Rows;
  using Online::Online;

  // Computes the probabilities (ROWS, COLS) of scores (ROWS, COLS) relative to `bases` (ROWS), and
  // this thread's sums (ROWS) of them. Returns whether settle() has to come first; the warp agrees.
  //   kChains  sums of a row that are independent until the end
  //   bases    those of bases(), or of settle()
  template <int kChains, class Scores, class Probabilities>
  CUTE_HOST_DEVICE bool attempt(Scores const& scores, Rows const& bases,
                                Probabilities&& probabilities, Rows& sums) const {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<0>(scores) == Int<kRows>{});
    CUTE_STATIC_ASSERT_V(shape(scores) == shape(probabilities));
    Rows chains[kChains];
    int peaks[kRows];
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); col += 2) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        CUTE_UNROLL
        for (int i = col; i < col + 2; ++i) {
          float const value = probability(scores(row, i), bases(row));
          float& sum = chains[i % kChains](row);
          sum = i < kChains ? value : sum + value;
          probabilities(row, i) = value;
        }
        peaks[row] = peak_of_pair(col == 0, peaks[row], probabilities(row, col),
                                  probabilities(row, col + 1));
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
    return exceed(peaks, bases);
  }

  // Whether an attempt with these scores (ROWS, COLS) would fail; the warp agrees. `bases` (ROWS):
  // those of bases().
  template <class Scores>
  CUTE_HOST_DEVICE bool would_fail(Scores const& scores, Rows const& bases) const {
    using namespace cute;
    int peaks[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      peaks[row] = Online::bits(probability(column_maximum<4>(scores, row), bases(row)));
    }
    return exceed(peaks, bases);
  }

  // Raises the reference of each row that exceeds a limit to the row's maximum. Gives the bases
  // (ROWS) of the next attempt, and the factors (ROWS) by which the output so far must be
  // multiplied. Changes the scores (ROWS, COLS) of rows whose reference is unusual.
  template <class Scores>
  CUTE_HOST_DEVICE void settle(Scores&& scores, Rows& bases, Rows& factors) {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const own = column_maximum<4>(scores, row);
      float const maximum = reduce_row_threads<Warp>(own, MaxOp{});
      float const old = this->reference(row), old_base = bases(row);
      bool const exceeds = Online::is_usual(old_base)
                               ? Online::bits(probability(own, old_base)) > limit(row, old_base)
                               : own > old;
      bool const grown = reduce_row_threads<Warp>(exceeds ? 1.f : 0.f, MaxOp{}) != 0.f;
      this->reference(row) = grown ? maximum : old;
      bases(row) = this->reference(row) * this->scale_log2;
      factors(row) = grown ? exp2f(-this->rise(row, old, old_base, bases(row))) : 1.f;
      this->row_sum(row) *= factors(row);
    }
    this->lower(scores, bases);
  }

  // Adds the sums (ROWS) of a tile.
  CUTE_HOST_DEVICE void add(Rows const& sums) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      this->row_sum(row) += sums(row);
    }
  }

 private:
  CUTE_HOST_DEVICE float probability(float score, float base) const {
    return exp2f(fmaf(score, this->scale_log2, -base));
  }

  // The bits of the largest probability that is allowed; below all if the base is no number to
  // compute with.
  CUTE_HOST_DEVICE int limit(int row, float base) const {
    float const most = fminf(fmaxf(this->row_sum(row), 1.f), float(1 << kMostLag));
    return Online::is_usual(base) ? Online::bits(most) : INT_MIN;
  }

  // The bits of probabilities have the order of integers. One instruction compares three.
  CUTE_HOST_DEVICE static int peak_of_pair(bool first, int peak, float a, float b) {
    return Warp::max3(first ? Online::bits(a) : peak, Online::bits(a), Online::bits(b));
  }

  CUTE_HOST_DEVICE bool exceed(int const (&peaks)[kRows], Rows const& bases) const {
    bool exceeds = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      exceeds |= peaks[row] > limit(row, bases(row));
    }
    return Warp::any(exceeds);
  }
};

}  // namespace cute_attention
