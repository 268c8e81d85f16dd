// core/capped_softmax.h: the softmax of scores under softcap, s -> softcap * tanh(s / softcap),
// with exact maxima and without a branch before the exponentials but one.
//
// The scores stay as they are. tanh grows with its argument, so the largest score of a row has the
// largest exponent, and the maxima are known before a score is mapped. Then a score goes from
// register to probability in one pass. Near 0, where scores are in most models,
//
//   softcap * tanh(scale * s / softcap) * log2(e)  =  s * f(s^2)
//
// with a polynomial f, and the exponent s * f(s^2) - base takes one instruction after f: three more
// than a softmax without softcap. A warp that has a score elsewhere computes an exponential and a
// quotient for each, too, and chooses score by score, so that the bits of a row do not depend on
// the other rows of its warp.
//
// Exponents are in base 2, so the references are what their bases are.
//
// A tile takes look() or maxima(), row_maxima(), raise(), one of the two exponentiate_...() and
// add(). A tile with a mask takes all_near() first, then bound_far() if not all are near, and then
// its mask, so that hidden scores, of keys that may not be the sequence's, are -infinity.
#pragma once

#include <cutlass/platform/platform.h>

#include <cfloat>

#include "cute_attention/core/opaque.h"
#include "cute_attention/core/row_softmax.h"
#include "cute_attention/core/softcap.h"

namespace cute_attention {

// f, and where it serves.
struct CappedCurve {
  // tanh(x) / x as a polynomial of x^2 where |x| <= 0.4, to a relative error of 6.3e-6: a fortieth
  // of what a score in fp16 is rounded by. The least that three coefficients allow, found by
  // weighted least squares, whose weights grow where the error is largest. At 0.5 it would be
  // 2.3e-5, which shows in the LSE of a row with few keys.
  static constexpr float kNear = 0.4f;
  static constexpr float k1 = 0.99999375f, k3 = -0.3326258f, k5 = 0.12127787f;
  // Beyond it powers of slope could be infinite in fp32, and less is near.
  static constexpr float kLargestSlope = 0x1p24f;

  float coefficients[3];  // of 1, s^2 and s^4
  float nearest;          // the largest magnitude of a score for which f serves
  // The same of a tile that may have hidden scores. Negative, so that no tile is, where slope is so
  // small that the last coefficient is 0: then f of a hidden score is no number.
  float nearest_of_tile;

  //   slope  scale / softcap
  //   cap    softcap * log2(e)
  CUTE_HOST_DEVICE CappedCurve(float slope, float cap) {
    float const bounded = fminf(slope, kLargestSlope), square = bounded * bounded;
    float const unit = cap * slope;
    coefficients[0] = unit * k1;
    coefficients[1] = unit * square * k3;
    coefficients[2] = unit * square * square * k5;
    // Without the last coefficients, which are 0 where slope is small, less is near.
    bool const has_last = coefficients[2] >= FLT_MIN, has_cubic = coefficients[1] <= -FLT_MIN;
    bool const is_line = slope > kLargestSlope || !has_cubic;
    nearest = (is_line ? kNear / 128 : has_last ? kNear : kNear / 5) / slope;
    nearest_of_tile = has_last ? nearest : -1.f;
  }

  // f(score^2). The last coefficient is positive, so a hidden score, -infinity, stays that when it
  // is multiplied by it.
  CUTE_HOST_DEVICE float factor(float score) const {
    float const square = score * score;
    return fmaf(square, fmaf(square, coefficients[2], coefficients[1]), coefficients[0]);
  }
  // A NaN is not far: it stays, and stays alone.
  CUTE_HOST_DEVICE bool is_far(float score) const { return fabsf(score) > nearest; }
};

template <int kRows, class Warp = DeviceWarp>
struct CappedSoftmax : RowSoftmax<kRows, Warp> {
  using Base = RowSoftmax<kRows, Warp>;
  using Base::add, Base::maxima, Base::reference, Base::row_sum;
  using typename Base::Rows;

  float slope;  // scale / softcap
  float cap;    // softcap * log2(e)

  CUTE_DEVICE CappedSoftmax(float scale, float softcap)
      : Base(float(M_LN2)), slope(scale / softcap), cap(softcap * float(M_LOG2E)) {}

  // Computed anew for each tile: kernels have no registers for it between.
  CUTE_DEVICE CappedCurve curve() const { return CappedCurve(opaque(slope), cap); }

  // Whether f serves all scores (ROWS, COLS) of the warp. One that is NaN counts as far: it may
  // hide others.
  template <class Scores>
  CUTE_DEVICE static bool all_near(CappedCurve const& curve, Scores const& scores) {
    return !Warp::any(!is_near(curve, peaks_of(scores)));
  }

  // The same for a tile without a mask, together with this thread's maxima (ROWS).
  template <class Scores>
  CUTE_DEVICE static bool look(CappedCurve const& curve, Scores const& scores, Rows& maxima) {
    Peaks const peaks = peaks_of(scores);
    bool negative = false;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      negative |= peaks.largest[row] < 0;
      maxima(row) = number(peaks.largest[row]);
    }
    bool const near = is_near(curve, peaks);
    if (__builtin_expect(!Warp::any(!near || negative), true)) {
      return true;
    }
    // Of negative numbers the peak is the least. One of -infinity comes from the data, as no mask
    // has hidden it: raise() is not to take it for hidden.
    maxima = Base::maxima(scores);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      maxima(row) = fmaxf(maxima(row), -FLT_MAX);
    }
    return !Warp::any(!near);
  }

  // Scores of -infinity that come from the data are finite, as those are that a mask hides.
  template <class Scores>
  CUTE_DEVICE static void bound_far(Scores&& scores) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) = scores(i) < -FLT_MAX ? -FLT_MAX : scores(i);
    }
  }

  // Those of all threads of a row.
  CUTE_DEVICE static Rows row_maxima(Rows const& maxima) {
    Rows reduced;
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      reduced(row) = reduce_row_threads<Warp>(maxima(row), MaxOp{});
    }
    return reduced;
  }

  // Raises the references to the exponents of the row_maxima() of a tile, and scales the sums so
  // far. Gives the bases (ROWS) of the tile's exponents, and the factors (ROWS) by which the output
  // so far must be multiplied.
  //   kAllNear  whether all scores of the warp are
  template <bool kAllNear>
  CUTE_DEVICE void raise(CappedCurve const& curve, Rows const& maxima, Rows& bases, Rows& factors) {
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float exponent = maxima(row) * curve.factor(maxima(row));
      if constexpr (!kAllNear) {
        float const far[1] = {maxima(row)};
        float capped[1];
        capped_far(far, capped);
        exponent = curve.is_far(maxima(row)) ? capped[0] : exponent;
        exponent = maxima(row) == -INFINITY ? -INFINITY : exponent;
      }
      float const old = reference(row);
      reference(row) = fmaxf(old, exponent);
      factors(row) = reference(row) > old ? exp2f(old - reference(row)) : 1.f;
      row_sum(row) *= factors(row);
      // A row that has seen only hidden scores.
      bases(row) = reference(row) == -INFINITY ? 0.f : reference(row);
    }
  }

  // Give the probabilities (ROWS, COLS) of a tile of scores (ROWS, COLS) relative to the bases
  // (ROWS), and this thread's sums (ROWS) of them: where all scores of the warp are near, and
  // anywhere.
  template <class Scores, class Probabilities>
  CUTE_DEVICE void exponentiate_near(CappedCurve const& curve, Scores const& scores,
                                     Rows const& bases, Probabilities&& probabilities,
                                     Rows& sums) const {
    using namespace cute;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float const score = scores(row, col);
        float const value = exp2f(fmaf(score, curve.factor(score), -bases(row)));
        sums(row) = col == 0 ? value : sums(row) + value;
        probabilities(row, col) = value;
      }
    }
  }
  // In groups of kGroup columns of a row, which share a quotient: larger ones take fewer
  // instructions and more registers. The scores of a group round each other's results.
  //   kMasked  whether some scores may be hidden
  template <int kGroup, bool kMasked, class Scores, class Probabilities>
  CUTE_DEVICE void exponentiate_far(CappedCurve const& curve, Scores const& scores,
                                    Rows const& bases, Probabilities&& probabilities,
                                    Rows& sums) const {
    using namespace cute;
    constexpr int kCols = decltype(size<1>(scores))::value;
    static_assert(kGroup <= 4 && kCols % kGroup == 0, "whole groups of scores");
    CUTE_UNROLL
    for (int first = 0; first < kCols; first += kGroup) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        float group[kGroup], capped[kGroup];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          group[i] = scores(row, first + i);
        }
        capped_far(group, capped);
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          bool const far = curve.is_far(group[i]);
          float const multiplied = far ? capped[i] : group[i];
          float const factor = far ? 1.f : curve.factor(group[i]);
          float exponent = fmaf(multiplied, factor, -bases(row));
          if (kMasked) {
            exponent = group[i] == -INFINITY ? -INFINITY : exponent;
          }
          // The base is the exponent of the largest score, computed alone. That of the same score
          // in a group may exceed it by 4e-6 of the cap: by far, if the cap is 1e8. A NaN stays.
          exponent = exponent > 1.f ? 1.f : exponent;
          float const value = exp2f(exponent);
          sums(row) = first + i == 0 ? value : sums(row) + value;
          probabilities(row, first + i) = value;
        }
      }
    }
  }

 private:
  // As integers the bits of floats from 0 on are in the same order, those of negative ones in the
  // opposite order, and one instruction compares three.
  struct Peaks {
    int largest[kRows];  // the bits of the largest of a row; if all are negative, of the least
    uint32_t most;       // the bits of the least of all; if none is negative, of the largest
  };

  template <class Scores>
  CUTE_DEVICE static Peaks peaks_of(Scores const& scores) {
    using namespace cute;
    constexpr int kCols = decltype(size<1>(scores))::value;
    static_assert(kCols % 2 == 0, "pairs of columns");
    Peaks peaks;
    uint32_t most[kRows];
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      int chains[2] = {bits(scores(row, 0)), bits(scores(row, 1))};
      most[row] = chains[0];
      most[row] = Warp::max3_unsigned(most[row], uint32_t(chains[0]), uint32_t(chains[1]));
      CUTE_UNROLL
      for (int col = 2; col < kCols; col += 2) {
        int const a = bits(scores(row, col)), b = bits(scores(row, col + 1));
        int& chain = chains[col / 2 % 2];
        chain = Warp::max3(chain, a, b);
        most[row] = Warp::max3_unsigned(most[row], uint32_t(a), uint32_t(b));
      }
      peaks.largest[row] = Warp::max3(chains[0], chains[1], chains[1]);
    }
    peaks.most = most[0];
    CUTE_UNROLL
    for (int row = 1; row < kRows; ++row) {
      peaks.most = Warp::max3_unsigned(peaks.most, most[row], most[row]);
    }
    return peaks;
  }

  CUTE_DEVICE static bool is_near(CappedCurve const& curve, Peaks const& peaks) {
    int farthest = int(peaks.most & 0x7fffffffu);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      farthest = farthest > peaks.largest[row] ? farthest : peaks.largest[row];
    }
    return farthest <= bits(curve.nearest_of_tile);
  }

  // The exponents of scores far from 0, to an absolute error of 2e-6 of the cap.
  template <int kGroup>
  CUTE_DEVICE void capped_far(float const (&scores)[kGroup], float (&capped)[kGroup]) const {
    for_far_quotients(scores, slope,
                      [&](int i, float quotient) { capped[i] = fmaf(-2.f * cap, quotient, cap); });
  }

  CUTE_DEVICE static int bits(float value) { return cutlass::platform::bit_cast<int>(value); }
  CUTE_DEVICE static float number(int bits) { return cutlass::platform::bit_cast<float>(bits); }
};

}  // namespace cute_attention
