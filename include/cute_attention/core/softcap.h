// core/softcap.h: s -> softcap * tanh(s / softcap).
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/config.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/warp.h"

namespace cute_attention {

// tanh(x) where |x| <= 0.625, of scores whose x is slope * score: an odd polynomial of degree 7, to
// a relative error of 2.9e-6, the least that four coefficients allow (found by weighted least
// squares, whose weights grow where the error is largest). In score units that is 9e-5 at most for
// a cap of 50.
struct SoftcapPolynomial {
  static constexpr float kNear = 0.625f;
  // Coefficients of x, x^3, x^5 and x^7.
  static constexpr float k1 = 0.99999709f, k3 = -0.333092316f, k5 = 0.130154592f,
                         k7 = -0.0400295153f;

  // The odd polynomial with these coefficients.
  template <class Coefficients>
  CUTE_DEVICE static float at(float x, Coefficients const& coefficients) {
    float const square = x * x;
    float factor = fmaf(square, coefficients[3], coefficients[2]);
    factor = fmaf(square, factor, coefficients[1]);
    factor = fmaf(square, factor, coefficients[0]);
    return x * factor;
  }
};

// The polynomial with powers of slope in its coefficients, so that a score takes five instructions.
//
// Where slope is so small that the last of them are 0 in fp32, and where it is so large that they
// would be infinite, less is near: what is missing there is below 2e-6 of a score, or 1e-4 of a
// cap below 1e-5.
struct FoldedPolynomial {
  static constexpr float kLeastSlope = 0x1p-17f, kLargestSlope = 0x1p17f;
  float coefficients[4];
  float nearest;  // the largest magnitude of a score for which it serves

  CUTE_DEVICE explicit FoldedPolynomial(float slope) {
    using P = SoftcapPolynomial;
    bool const is_usual = slope >= kLeastSlope && slope <= kLargestSlope;
    nearest = (is_usual ? P::kNear : P::kNear / 10) / slope;
    float const bounded = fminf(slope, kLargestSlope), square = bounded * bounded;
    coefficients[0] = slope * P::k1;
    coefficients[1] = bounded * square * P::k3;
    coefficients[2] = bounded * square * square * P::k5;
    coefficients[3] = bounded * square * square * square * P::k7;
  }

  // tanh(slope * score)
  CUTE_DEVICE float operator()(float score) const {
    return SoftcapPolynomial::at(score, coefficients);
  }
  CUTE_DEVICE bool reaches(float largest) const { return !(largest > nearest); }
  // Squares, of which the polynomial has one: with the magnitudes of all_near() ptxas would keep
  // those. A NaN is not far: it stays, and stays alone.
  CUTE_DEVICE bool is_far(float score) const { return score * score > nearest * nearest; }
};

// The polynomial as it is, for kernels that have no registers for such coefficients: it takes an
// instruction more.
struct PlainPolynomial {
  float slope;

  CUTE_DEVICE explicit PlainPolynomial(float slope) : slope(slope) {}

  CUTE_DEVICE float operator()(float score) const {
    using P = SoftcapPolynomial;
    float const coefficients[4] = {P::k1, P::k3, P::k5, P::k7};
    return P::at(score * slope, coefficients);
  }
  CUTE_DEVICE bool reaches(float largest) const {
    return !(largest * slope > SoftcapPolynomial::kNear);
  }
  CUTE_DEVICE bool is_far(float score) const {
    return fabsf(score * slope) > SoftcapPolynomial::kNear;
  }
};

// Calls use(i, 1 / (1 + exp(2 x))) for each score of a group, from the last to the first, where x
// is slope * score. Twice that, from 1, is tanh(x), to an absolute error of 2e-6: it cancels near
// 0. A quotient takes as long as an exponential: the group shares one, of the product of its
// denominators, which are held below 2^31 so that it is finite.
template <int kGroup, class Use>
CUTE_DEVICE void for_far_quotients(float const (&scores)[kGroup], float slope, Use const& use) {
  float const exponent = slope * float(2 * M_LOG2E);
  float denominators[kGroup], products[kGroup];
  CUTE_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    denominators[i] = 1.f + exp2f(fminf(scores[i] * exponent, 30.f));
    products[i] = i == 0 ? denominators[0] : products[i - 1] * denominators[i];
  }
  float inverse = __fdividef(1.f, products[kGroup - 1]);
  CUTE_UNROLL
  for (int i = kGroup - 1; i >= 0; --i) {
    float const quotient = i == 0 ? inverse : inverse * products[i - 1];
    inverse *= denominators[i];
    use(i, quotient);
  }
}

// A modifier of scores (score_mod.h). It leaves y = tanh(x), where x = s / softcap, so that softcap
// is the unit of the scores after it.
//
// Near 0 a polynomial is enough. Elsewhere tanh takes an exponential and a part of a quotient, and
// more than twice the time. So a warp whose scores are all near 0, as they are in most models,
// computes the polynomial alone. Any other warp computes both and chooses score by score: so the
// bits of a score do not depend on the other rows of its warp.
template <class Polynomial>
struct SoftcapMapBy {
  static constexpr uint32_t kBit = score_mods::Softcap;
  static constexpr bool kIsMap = true;
  float slope;  // unit / softcap: x = slope * score

  template <class Params>
  CUTE_DEVICE SoftcapMapBy(Params const& params, float unit) : slope(unit / params.softcap) {}

  // Computed anew at each use: kernels have no registers for it between.
  CUTE_DEVICE Polynomial polynomial() const { return Polynomial(opaque(slope)); }

  template <class Params>
  CUTE_DEVICE static float unit_after(Params const& params, float) {
    return params.softcap;
  }

  // Whether the polynomial serves all scores of the warp. Those that are NaN do not count: it
  // leaves them NaN.
  template <class Scores>
  CUTE_DEVICE bool all_near(Scores const& scores) const {
    constexpr int kChains = 4;
    float largest[kChains] = {};
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      largest[i % kChains] = fmaxf(largest[i % kChains], fabsf(scores(i)));
    }
    float const most = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    return !DeviceWarp::any(!polynomial().reaches(most));
  }

  // Scores (ROWS, COLS) or (COLS). Where not all are near, in groups of up to four columns of a
  // row: larger ones take fewer instructions and more registers. The scores of a group round each
  // other's results.
  //   near  all_near() of these scores, or of more
  template <int kGroup, class Scores>
  CUTE_DEVICE void map(Scores&& scores, bool near) const {
    using namespace cute;
    auto rows = make_tensor(scores.data(), prepend<2>(scores.layout()));  // (ROWS, COLS)
    constexpr int kCols = decltype(size<1>(rows))::value;
    static_assert(kGroup <= 4 && kCols % kGroup == 0, "whole groups of scores");
    Polynomial const tanh_near = polynomial();
    if (__builtin_expect(near, true)) {
      CUTE_UNROLL
      for (int i = 0; i < size(rows); ++i) {
        rows(i) = tanh_near(rows(i));
      }
      return;
    }
    CUTE_UNROLL
    for (int first = 0; first < kCols; first += kGroup) {
      CUTE_UNROLL
      for (int row = 0; row < size<0>(rows); ++row) {
        float group[kGroup];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          group[i] = rows(row, first + i);
        }
        map_group(group, tanh_near);
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          rows(row, first + i) = group[i];
        }
      }
    }
  }

  // d(softcap * y) / ds, from y.
  //   kFinite  whether no y is infinite. Else that of -infinity, a hidden score, is 0.
  template <bool kFinite>
  CUTE_DEVICE static float derivative(float modified) {
    float const derivative = fmaf(-modified, modified, 1.f);
    return kFinite ? derivative : fmaxf(derivative, 0.f);
  }

 private:
  // Scores become their tanh(x), to an absolute error of 2e-6 and, near 0, the relative one of the
  // polynomial; tanh.approx, with 5e-4, costs a bfloat16's precision where scores come near the
  // cap.
  template <int kGroup>
  CUTE_DEVICE void map_group(float (&scores)[kGroup], Polynomial const& tanh_near) const {
    for_far_quotients(scores, slope, [&](int i, float quotient) {
      float const far = fmaf(-2.f, quotient, 1.f);
      scores[i] = tanh_near.is_far(scores[i]) ? far : tanh_near(scores[i]);
    });
  }
};

using SoftcapMap = SoftcapMapBy<FoldedPolynomial>;

}  // namespace cute_attention
