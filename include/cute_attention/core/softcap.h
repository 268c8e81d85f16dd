// core/softcap.h: s -> softcap * tanh(s / softcap).
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/config.h"

namespace cute_attention {

// A modifier of scores (score_mod.h). It leaves y = tanh(s / softcap), so that softcap is the unit
// of the scores after it.
struct SoftcapMap {
  static constexpr uint32_t kBit = score_mods::Softcap;
  static constexpr bool kIsMap = true;
  float slope;  // 2 unit / (softcap ln 2): tanh is 1 - 2 / (1 + exp2(slope * x))

  template <class Params>
  CUTE_DEVICE SoftcapMap(Params const& params, float unit)
      : slope(unit / params.softcap * float(2 * M_LOG2E)) {}

  template <class Params>
  CUTE_DEVICE static float unit_after(Params const& params, float) {
    return params.softcap;
  }

  // Scores (ROWS, COLS) or (COLS), in groups of up to four columns of a row: larger ones take fewer
  // instructions and more registers. The scores of a group round each other's results, and one that
  // is NaN makes all of them NaN.
  template <int kGroup, class Scores>
  CUTE_DEVICE void map(Scores&& scores) const {
    using namespace cute;
    auto rows = make_tensor(scores.data(), prepend<2>(scores.layout()));  // (ROWS, COLS)
    constexpr int kCols = decltype(size<1>(rows))::value;
    static_assert(kGroup <= 4 && kCols % kGroup == 0, "whole groups of scores");
    CUTE_UNROLL
    for (int first = 0; first < kCols; first += kGroup) {
      CUTE_UNROLL
      for (int row = 0; row < size<0>(rows); ++row) {
        float exponents[kGroup], tanhs[kGroup];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          exponents[i] = rows(row, first + i) * slope;
        }
        tanh_of_half(exponents, tanhs);
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
  // tanh(z ln(2) / 2) to an absolute error of 1e-6 and, near 0, a relative one of as much;
  // tanh.approx, with 5e-4, costs a bfloat16's precision where scores come near the cap. A quotient
  // takes as long as an exponential: a group shares one, of the product of its denominators, which
  // are held below 2^31 so that it is finite.
  template <int kGroup>
  CUTE_DEVICE static void tanh_of_half(float const (&z)[kGroup], float (&result)[kGroup]) {
    float denominators[kGroup], products[kGroup];
    CUTE_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      denominators[i] = 1.f + exp2f(fminf(z[i], 30.f));
      products[i] = i == 0 ? denominators[0] : products[i - 1] * denominators[i];
    }
    float inverse = __fdividef(1.f, products[kGroup - 1]);
    CUTE_UNROLL
    for (int i = kGroup - 1; i >= 0; --i) {
      float const quotient = i == 0 ? inverse : inverse * products[i - 1];
      inverse *= denominators[i];
      // 1 - 2 / (1 + exp2(z)) cancels near 0, where the Taylor series takes its place.
      float const far = fmaf(-2.f, quotient, 1.f);
      constexpr float kHalfLn2 = float(M_LN2 / 2);
      float const near = z[i] * fmaf(z[i] * z[i], -kHalfLn2 * kHalfLn2 * kHalfLn2 / 3, kHalfLn2);
      result[i] = !(fabsf(z[i]) >= 0.15f) ? near : far;  // NaN stays, and stays alone
    }
  }
};

}  // namespace cute_attention
