// core/softcap.h: s -> softcap * tanh(s / softcap).
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/config.h"
#include "cute_attention/core/warp.h"

namespace cute_attention {

// A modifier of scores (score_mod.h). It leaves y = tanh(x), where x = s / softcap, so that softcap
// is the unit of the scores after it.
//
// Near 0 a polynomial is enough. Elsewhere tanh takes an exponential and a part of a quotient, and
// more than twice the time. So a warp whose scores are all near 0, as they are in most models,
// computes the polynomial alone. Any other warp computes both and chooses score by score: so the
// bits of a score do not depend on the other rows of its warp.
struct SoftcapMap {
  static constexpr uint32_t kBit = score_mods::Softcap;
  static constexpr bool kIsMap = true;
  float slope;  // unit / softcap: x = slope * score

  template <class Params>
  CUTE_DEVICE SoftcapMap(Params const& params, float unit) : slope(unit / params.softcap) {}

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
    return !DeviceWarp::any(most * slope > kNear);
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
    if (__builtin_expect(near, true)) {
      CUTE_UNROLL
      for (int i = 0; i < size(rows); ++i) {
        rows(i) = tanh_near(rows(i) * slope);
      }
      return;
    }
    CUTE_UNROLL
    for (int first = 0; first < kCols; first += kGroup) {
      CUTE_UNROLL
      for (int row = 0; row < size<0>(rows); ++row) {
        float x[kGroup], tanhs[kGroup];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          x[i] = rows(row, first + i) * slope;
        }
        tanh_of(x, tanhs);
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          rows(row, first + i) = tanhs[i];
        }
      }
    }
  }

  // d(softcap * y) / ds, from y; 0 for a hidden score.
  CUTE_DEVICE static float derivative(float modified) {
    return fmaxf(fmaf(-modified, modified, 1.f), 0.f);
  }

 private:
  static constexpr float kNear = 0.75f;

  // tanh(x) for |x| <= kNear, to a relative error of 7e-7: a polynomial in x^2 whose largest
  // relative error is the least that five coefficients allow (found by weighted least squares,
  // whose weights grow where the error is largest).
  CUTE_DEVICE static float tanh_near(float x) {
    float const square = x * x;
    float factor = fmaf(square, 0.0129296324f, -0.0500563033f);
    factor = fmaf(square, factor, 0.132589833f);
    factor = fmaf(square, factor, -0.333282515f);
    factor = fmaf(square, factor, 0.999999435f);
    return x * factor;
  }

  // tanh(x) to an absolute error of 1e-6 and, near 0, a relative one of as much; tanh.approx, with
  // 5e-4, costs a bfloat16's precision where scores come near the cap. Far from 0 it is
  // 1 - 2 / (1 + exp(2 x)), which cancels near 0. A quotient takes as long as an exponential: a
  // group shares one, of the product of its denominators, which are held below 2^31 so that it is
  // finite.
  template <int kGroup>
  CUTE_DEVICE static void tanh_of(float const (&x)[kGroup], float (&result)[kGroup]) {
    float denominators[kGroup], products[kGroup];
    CUTE_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      denominators[i] = 1.f + exp2f(fminf(x[i] * float(2 * M_LOG2E), 30.f));
      products[i] = i == 0 ? denominators[0] : products[i - 1] * denominators[i];
    }
    float inverse = __fdividef(1.f, products[kGroup - 1]);
    CUTE_UNROLL
    for (int i = kGroup - 1; i >= 0; --i) {
      float const quotient = i == 0 ? inverse : inverse * products[i - 1];
      inverse *= denominators[i];
      float const far = fmaf(-2.f, quotient, 1.f);
      result[i] = !(fabsf(x[i]) > kNear) ? tanh_near(x[i]) : far;  // NaN stays, and stays alone
    }
  }
};

}  // namespace cute_attention
