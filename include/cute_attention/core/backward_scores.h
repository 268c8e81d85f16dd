// core/backward_scores.h: P and dS of the backward pass, score by score.
#pragma once

#include "cute_attention/core/score_mod.h"

namespace cute_attention {

// Computes P = exp(S' - LSE) and dS = P * (dP + delta) * dS'/dS, where S' is the modified score. A
// kernel calls begin() while the MMAs of dP run. It calls finish() when these have left dP + delta,
// in accumulators that started with delta.
//
// Without a modifier begin() computes P, and finish() only multiplies. With a modifier the
// derivative is computed from S', and P would take the register of S' too early: so begin()
// computes S', and finish() computes P and dS together, without another register for each score.
template <ScoreMod kMod>
struct BackwardScores {
  using Modifier = ScoreModifier<kMod>;
  // Whether the kernel masks scores before begin(). Else it masks modified scores after begin().
  static constexpr bool kMasksFirst = Modifier::kIsIdentity;
  Modifier modifier;
  float scale_log2;

  template <class Params>
  CUTE_DEVICE explicit BackwardScores(Params const& params)
      : modifier(params), scale_log2(Modifier::exponent_scale(params) * float(M_LOG2E)) {}

  // P of a masked and modified score. A query that sees no key has an LSE of +infinity here, so
  // that its P is exp2(-inf - inf) = 0 and not NaN.
  CUTE_DEVICE float probability(float score, float lse_log2) const {
    return exp2f(score * scale_log2 - lse_log2);
  }

  // Before dP is there.
  //   scores     (KEYS)  of one query
  template <class Scores>
  CUTE_DEVICE void begin(Scores&& scores, float const& lse_log2) const {
    modifier.template modify<1>(scores);
    if constexpr (Modifier::kIsIdentity) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        scores(i) = probability(scores(i), lse_log2);
      }
    }
  }

  // Of a score as begin() left it: makes it P, and returns dS / (dP + delta) = P * dS'/dS.
  CUTE_DEVICE float factor(float& score, float lse_log2) const {
    if constexpr (Modifier::kIsIdentity) {
      return score;
    } else {
      float const modified = score;
      score = probability(modified, lse_log2);
      return score * Modifier::derivative(modified);
    }
  }

  // When dP + delta is there.
  //   scores     (KEYS)  of one query: what begin() left, becomes P
  //   gradients  (KEYS)  of the same query: dP + delta, becomes dS
  template <class Scores, class Gradients>
  CUTE_DEVICE void finish(Scores&& scores, Gradients&& gradients, float const& lse_log2) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      gradients(i) *= factor(scores(i), lse_log2);
    }
  }
};

}  // namespace cute_attention
