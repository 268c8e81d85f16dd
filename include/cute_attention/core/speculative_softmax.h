// core/speculative_softmax.h: the online softmax of online_softmax.h as straight code, for kernels
// whose warps have all keys of a row.
//
// The exponentials keep the MUFU busy for 8 cycles each. Sums, conversions and comparisons find room
// beside them, but only if no branch stands between. A tile hardly ever raises a reference. So
// attempt() computes probabilities relative to the references as they are, and finds the largest
// probability beside the exponentials. If that exceeds what its row allows, settle() raises
// references, from the scores, which are still there, and the attempt is made again.
//
// Where references are likely to rise, settle() comes first: then nothing is computed twice.
//
// A probability may be as large as the sum so far. Each thread compares its own probabilities with its
// own part of the sum. What a row does never depends on the other rows of the warp.
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
  // this thread's sums (ROWS) of them. Returns whether they cannot be used; the warp agrees.
  //   kSettled  after settle() with these scores: then lower() mends it. Else settle() does.
  //   kChains   sums of a row that are independent until the end
  //   bases     those of bases(), or of settle()
  template <bool kSettled, int kChains, class Scores, class Probabilities>
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
    bool fails = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      sums(row) = chains[0](row);
      CUTE_UNROLL
      for (int chain = 1; chain < kChains; ++chain) {
        sums(row) += chains[chain](row);
      }
      bool const usual = Online::is_usual(bases(row));
      fails |= !usual || (!kSettled && peaks[row] > limit(row));
    }
    return Warp::any(fails);
  }

  // Raises the reference of each row that exceeds its limit to the row's maximum. Gives the bases
  // (ROWS) of the next attempt, and the factors (ROWS) by which the output so far must be
  // multiplied. Returns whether a reference of the warp has risen.
  //   kFirst  the scores are those of the first tile
  template <bool kFirst, class Scores>
  CUTE_HOST_DEVICE bool settle(Scores const& scores, Rows& bases, Rows& factors) {
    using namespace cute;
    bool rises = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float const own = column_maximum<4>(scores, row);
      float const maximum = reduce_row_threads<Warp>(own, MaxOp{});
      if constexpr (kFirst) {
        this->reference(row) = maximum;
        bases(row) = maximum * this->scale_log2;
      } else {
        float const old = this->reference(row), old_base = old * this->scale_log2;
        bool const exceeds = Online::is_usual(old_base)
                                 ? Online::bits(probability(own, old_base)) > limit(row)
                                 : own > old;
        bool const grown = reduce_row_threads<Warp>(exceeds ? 1.f : 0.f, MaxOp{}) != 0.f;
        this->reference(row) = grown ? maximum : old;
        bases(row) = this->reference(row) * this->scale_log2;
        factors(row) = grown ? exp2f(-this->rise(row, old, old_base, bases(row))) : 1.f;
        this->row_sum(row) *= factors(row);
        rises |= grown;
      }
    }
    return Warp::any(rises);
  }

  // Changes the scores (ROWS, COLS) of rows whose base is unusual, so that they have a base (ROWS) that
  // is not.
  template <class Scores>
  CUTE_HOST_DEVICE void lower(Scores&& scores, Rows& bases) const {
    Online::lower(scores, bases);
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

  // The bits of the largest probability that this thread allows a row.
  CUTE_HOST_DEVICE int limit(int row) const {
    return Online::bits(fminf(fmaxf(this->row_sum(row), 1.f), float(1 << kMostLag)));
  }

  // The bits of probabilities have the order of integers. One instruction compares three.
  CUTE_HOST_DEVICE static int peak_of_pair(bool first, int peak, float a, float b) {
    return Warp::max3(first ? Online::bits(a) : peak, Online::bits(a), Online::bits(b));
  }
};

}  // namespace cute_attention
