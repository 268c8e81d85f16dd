// core/backward_scores.h: P and dS of the backward pass, element by element.
#pragma once

#include "cute_attention/core/score_mod.h"

namespace cute_attention {

// P = exp(S - LSE) and dS = P (dP + delta) dS'/dS in two halves: the first runs under the products
// of dP, the second has dP + delta, as the products began with delta. A modifier's derivative comes
// from the modified score, which P cannot replace before dS is there: then the exponentials belong
// to the second half, and no register is held for them.
template <ScoreMod kMod>
struct BackwardScores {
  using Modifier = ScoreModifier<kMod>;
  // Whether scores are masked before begin(), or modified scores after it.
  static constexpr bool kMasksFirst = Modifier::kIsIdentity;
  Modifier modifier;
  float scale_log2;

  template <class Params>
  CUTE_DEVICE explicit BackwardScores(Params const& params)
      : modifier(params), scale_log2(Modifier::exponent_scale(params) * float(M_LOG2E)) {}

  // Of a score, masked and modified; a query without keys has LSE +infinity here: exp2(-inf - inf)
  // is 0, not NaN.
  CUTE_DEVICE float probability(float score, float lse_log2) const {
    return exp2f(score * scale_log2 - lse_log2);
  }

  // Before dP: scores (KEYS) of one query.
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

  // With dP + delta (KEYS) of one query: turns what begin() left into P, and those into dS.
  template <class Scores, class Gradients>
  CUTE_DEVICE void finish(Scores&& scores, Gradients&& gradients, float const& lse_log2) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      if constexpr (Modifier::kIsIdentity) {
        gradients(i) *= scores(i);
      } else {
        float const modified = scores(i);
        scores(i) = probability(modified, lse_log2);
        gradients(i) *= scores(i) * Modifier::derivative(modified);
      }
    }
  }
};

}  // namespace cute_attention
