// core/backward_scores.h: P and dS of the backward pass, score by score.
#pragma once

#include "cute_attention/core/score_mod.h"

namespace cute_attention {

// Computes P = exp(S' - LSE) and dS = P * (dP + delta) * dS'/dS, where S' is the modified score. A
// kernel calls begin() while the MMAs of dP run. It calls finish() when these have left dP + delta,
// in accumulators that started with delta.
//
// Without a map begin() computes P, and finish() only multiplies. With a map the derivative is
// computed from what the map left, and P would take its register too early: so begin() applies the
// map, and finish() computes P and dS together, without another register for each score. Terms are
// added in the exponent of P, or by add_terms().
//
// With a map and a bias (kModifiesCopies) neither place will do for the bias: what a mask hides may
// have any, NaN too, and the derivative needs what the map left. Then a kernel adds the terms to a
// copy of a few scores, in registers that it uses again for the next few, masks the copy, and has
// factor() compute P from it.
//   kElsewhere  modifiers that the kernel applies by itself
//   kFinite     whether mapped scores stay finite: what hides one is kHidden, and not -infinity.
//               Then the derivative takes an instruction less.
template <uint32_t kScoreMods, uint32_t kElsewhere = score_mods::None, bool kFinite = false>
struct BackwardScores {
  using Modifiers = ScoreModifiers<kScoreMods, kElsewhere>;
  using Terms = typename Modifiers::Terms;
  // Whether the kernel masks scores before begin(). Else it masks mapped scores after begin().
  static constexpr bool kMasksFirst = !Modifiers::kHasMap;
  // How the terms are added: in the exponent of P, or to the scores before they are masked.
  static constexpr bool kTermsInExponent = Terms::kInExponent;
  static constexpr bool kTermsInScores = Modifiers::kHasTerm && !kTermsInExponent;
  static constexpr bool kModifiesCopies =
      Modifiers::kHasMap && (kScoreMods & score_mods::Bias) != 0;
  static_assert(kMasksFirst || !kTermsInScores || kModifiesCopies,
                "the derivative of a map is computed from what the map left");
  // A hidden score. The finite one makes P = 0 too, and its square, in the derivative of softcap,
  // is finite. Copies are hidden, but not the mapped scores from which derivatives come.
  static constexpr float kHidden =
      kFinite && Modifiers::kHasMap && !kModifiesCopies ? -1e18f : -INFINITY;
  Modifiers modifiers;
  float scale_log2;

  template <class Params>
  CUTE_DEVICE explicit BackwardScores(Params const& params)
      : modifiers(params), scale_log2(scale_of(params) * float(M_LOG2E)) {}

  // What a score in its unit is multiplied with. A cap below 1e-10 is rounded up to that, where P
  // of visible scores is the same: so kHidden is below kLowestLseLog2, and its P 0, for any cap.
  template <class Params>
  CUTE_DEVICE static float scale_of(Params const& params) {
    float const scale = Modifiers::exponent_scale(params);
    return kHidden == -INFINITY ? scale : fmaxf(scale, 1e-10f);
  }

  // What a step needs to know of the head of its queries.
  template <class Params>
  CUTE_DEVICE static typename Terms::OfHead of_head(Params const& params, int32_t batch,
                                                    int32_t head) {
    if constexpr (Modifiers::kHasTerm) {
      return Terms::of_head(params, batch, head);
    } else {
      return {};
    }
  }

  // Adds the terms to scores of a step before they are masked, with kTermsInScores.
  //   Element  of q
  //   tile     the scores (score_tile.h)
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add_terms(Params const& params, typename Terms::OfHead const& head,
                                    Tile const& tile) {
    Terms::template add_of_head<Element>(params, tile, head, Modifiers::exponent_scale(params));
  }

  // The terms in the exponents of a step, whose scores tile() describes (score_tile.h); of_query()
  // returns those of a query, for begin() and finish().
  //   head  has what of_head() returns
  template <class OfHead, class Tile>
  CUTE_DEVICE static auto terms(OfHead const& head, Tile const& tile) {
    if constexpr (kTermsInExponent) {
      return typename Terms::template OfStep<decltype(tile())>(tile(), head);
    } else {
      return NoTerms::OfStep{};
    }
  }

  // P of a masked and mapped score of key `i`. A query that sees no key has an LSE of +infinity
  // here, so that its P is exp2(-inf - inf) = 0 and not NaN.
  template <class TermsOfQuery>
  CUTE_DEVICE float probability(float score, float lse_log2, TermsOfQuery const& terms,
                                int i) const {
    if constexpr (kTermsInExponent) {
      return exp2f(score * scale_log2 + (terms(i) - lse_log2));
    } else {
      return exp2f(score * scale_log2 - lse_log2);
    }
  }

  // What begin() asks of all scores of a step, (KEYS, QUERIES), before the first of them is
  // changed. The warp calls it together.
  template <class Scores>
  CUTE_DEVICE bool all_near(Scores const& scores) const {
    return modifiers.all_near(scores);
  }

  // Before dP is there.
  //   scores     (KEYS)  of one query
  //   near       all_near() of the step
  template <class Scores, class TermsOfQuery>
  CUTE_DEVICE void begin(Scores&& scores, bool near, float const& lse_log2,
                         TermsOfQuery const& terms) const {
    modifiers.template map<1>(scores, near);
    if constexpr (!Modifiers::kHasMap) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(scores); ++i) {
        scores(i) = probability(scores(i), lse_log2, terms, i);
      }
    }
  }

  // begin() of all scores of a step, (KEYS, QUERIES), for lists with a map and kernels that do
  // nothing between queries. A branch, on all_near(), for kQueriesAtOnce queries, where a call for
  // each query takes one for each: nothing is scheduled across branches.
  template <int kQueriesAtOnce, class Scores>
  CUTE_DEVICE void map_all(Scores&& scores) const {
    using namespace cute;
    constexpr int kAtOnce = kQueriesAtOnce, kQueries = decltype(size<1>(scores))::value;
    static_assert(kQueries % kAtOnce == 0, "whole blocks of queries");
    bool const near = all_near(scores);
    CUTE_UNROLL
    for (int query = 0; query < kQueries; query += kAtOnce) {
      auto const part =
          make_tile(Layout<Int<decltype(size<0>(scores))::value>>{}, Layout<Int<kAtOnce>>{});
      modifiers.template map<1>(make_tensor(scores.data() + scores.layout()(0, query),
                                            composition(scores.layout(), part)),
                                near);
    }
  }

  // Of the score of key `i` as begin() left it: makes it P, and returns dS / (dP + delta), which is
  // P * dS'/dS.
  template <class TermsOfQuery>
  CUTE_DEVICE float factor(float& score, float lse_log2, TermsOfQuery const& terms, int i) const {
    if constexpr (!Modifiers::kHasMap) {
      return score;
    } else {
      float const mapped = score;
      score = probability(mapped, lse_log2, terms, i);
      return score * modifiers.template derivative<kFinite>(mapped);
    }
  }

  // The same with kModifiesCopies.
  //   score     as begin() left it; becomes P
  //   modified  its copy, with terms and masked
  CUTE_DEVICE float factor(float& score, float modified, float lse_log2) const {
    float const mapped = score;
    score = exp2f(modified * scale_log2 - lse_log2);
    return score * modifiers.template derivative<kFinite>(mapped);
  }

  // When dP + delta is there.
  //   scores     (KEYS)  of one query: what begin() left, becomes P
  //   gradients  (KEYS)  of the same query: dP + delta, becomes dS
  template <class Scores, class Gradients, class TermsOfQuery>
  CUTE_DEVICE void finish(Scores&& scores, Gradients&& gradients, float const& lse_log2,
                          TermsOfQuery const& terms) const {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      gradients(i) *= factor(scores(i), lse_log2, terms, i);
    }
  }
};

}  // namespace cute_attention
