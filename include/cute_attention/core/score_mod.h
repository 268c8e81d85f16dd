// core/score_mod.h: what happens to a score between the scale and the mask: the modifiers of a row,
// as a list of types.
//
// A modifier is one small type, seen by forward and backward of every architecture. There are two
// kinds:
//
//   a map   replaces a score by a function of it (softcap). It knows its derivative.
//   a term  adds a number that depends on where the score stands, and not on the score (ALiBi,
//           bias). Its derivative is 1. A list with several terms adds their sum.
//
// Scores stay in a unit of their own: a score s is unit * y, where y is what the kernel holds, and
// the softmax folds the unit into its exponent. q.k has the unit `scale`. So a list that changes
// nothing costs nothing. A map may change the unit.
//
// The maps of a list stand before its terms. The backward computes the derivative of a map from
// what the map left. So a term that is cheap to compute is added in the exponent of P and not to
// the score, for which no second register is needed then.
//
// The modifiers of a row that serves calls without them too (serves_subsets() of config.h) do
// nothing in such a call: a branch that all threads take alike.
//
// Scores are masked after they are modified. A score of -infinity that comes from the data is not
// hidden: its softcap is finite.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "cute_attention/config.h"
#include "cute_attention/core/alibi.h"
#include "cute_attention/core/bias.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/softcap.h"

namespace cute_attention {

// What a list without terms knows of places: nothing.
struct NoTerms {
  static constexpr bool kInExponent = false;
  template <int kRows>
  struct OfRows {};
  template <class Element, class Params, class Tile, class Rows>
  CUTE_DEVICE static void add(Params const&, Tile const&, Rows const&) {}
  struct OfHead {};
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add_of_head(Params const&, Tile const&, OfHead const&, float) {}
  struct OfStep {
    CUTE_DEVICE NoTerms of_query(int) const { return {}; }
  };
};

// The sum of two terms, of which the second may be such a sum.
template <class First, class Second>
struct SumOfTerms {
  static constexpr bool kInExponent = false;

  template <int kRows>
  struct OfRows {
    typename First::template OfRows<kRows> first;
    typename Second::template OfRows<kRows> second;

    template <class Params, class Head>
    CUTE_DEVICE void load(Params const& params, int32_t batch, Head const& head, float unit) {
      first.load(params, batch, head, unit);
      second.load(params, batch, head, unit);
    }
  };
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add(Params const& params, Tile const& tile,
                              OfRows<Tile::kRows> const& rows) {
    First::template add<Element>(params, tile, rows.first);
    Second::template add<Element>(params, tile, rows.second);
  }

  struct OfHead : First::OfHead, Second::OfHead {};
  template <class Params>
  CUTE_DEVICE static OfHead of_head(Params const& params, int32_t batch, int32_t head) {
    return {First::of_head(params, batch, head), Second::of_head(params, batch, head)};
  }
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add_of_head(Params const& params, Tile const& tile, OfHead const& head,
                                      float unit) {
    First::template add_of_head<Element>(params, tile, head, unit);
    Second::template add_of_head<Element>(params, tile, head, unit);
  }
};

// A map of a row that serves calls without it too.
template <class Map>
struct OptionalMap {
  static constexpr uint32_t kBit = Map::kBit;
  static constexpr bool kIsMap = true;
  Map chosen;
  bool is_there;

  template <class Params>
  CUTE_DEVICE static bool is_in(Params const& params) {
    return call_has<score_mods::Every, kBit>(params);
  }
  template <class Params>
  CUTE_DEVICE OptionalMap(Params const& params, float unit)
      : chosen(params, unit), is_there(is_in(params)) {}

  template <class Params>
  CUTE_DEVICE static float unit_after(Params const& params, float unit) {
    return is_in(params) ? Map::unit_after(params, unit) : unit;
  }
  template <class Scores>
  CUTE_DEVICE bool all_near(Scores const& scores) const {
    return !is_there || chosen.all_near(scores);
  }
  template <int kGroup, class Scores>
  CUTE_DEVICE void map(Scores&& scores, bool near) const {
    if (is_there) {
      chosen.template map<kGroup>(scores, near);
    }
  }
  template <bool kFinite>
  CUTE_DEVICE float derivative(float mapped) const {
    return is_there ? chosen.template derivative<kFinite>(mapped) : 1.f;
  }
};

// A term of a row that serves calls without it too.
template <class Term>
struct OptionalTerm {
  static constexpr uint32_t kBit = Term::kBit;
  static constexpr bool kIsMap = false;
  static constexpr bool kInExponent = false;

  template <class Params>
  CUTE_HOST_DEVICE OptionalTerm(Params const&, float) {}

  template <class Params>
  CUTE_HOST_DEVICE static bool is_in(Params const& params) {
    return call_has<score_mods::Every, kBit>(params);
  }
  template <class Params>
  CUTE_HOST_DEVICE static float unit_after(Params const&, float unit) {
    return unit;
  }

  template <int kRows>
  struct OfRows : Term::template OfRows<kRows> {
    template <class Params, class Head>
    CUTE_DEVICE void load(Params const& params, int32_t batch, Head const& head, float unit) {
      if (is_in(params)) {
        Term::template OfRows<kRows>::load(params, batch, head, unit);
      }
    }
  };
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add(Params const& params, Tile const& tile,
                              OfRows<Tile::kRows> const& rows) {
    if (is_in(params)) {
      Term::template add<Element>(params, tile, rows);
    }
  }

  using OfHead = typename Term::OfHead;
  template <class Params>
  CUTE_DEVICE static OfHead of_head(Params const& params, int32_t batch, int32_t head) {
    return is_in(params) ? Term::of_head(params, batch, head) : OfHead{};
  }
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add_of_head(Params const& params, Tile const& tile, OfHead const& head,
                                      float unit) {
    if (is_in(params)) {
      Term::template add_of_head<Element>(params, tile, head, unit);
    }
  }
};

// Modifiers, applied in this order. Here: none.
template <class... Modifiers>
struct ModifierList {
  static constexpr bool kHasMap = false;
  static constexpr bool kHasTerm = false;
  using Terms = NoTerms;

  template <class Params>
  CUTE_DEVICE ModifierList(Params const&, float) {}

  template <class Params>
  CUTE_DEVICE static float unit_after(Params const&, float unit) {
    return unit;
  }
  template <class Scores>
  CUTE_DEVICE bool all_near(Scores const&) const {
    return true;
  }
  template <int kGroup, class Scores>
  CUTE_DEVICE void map(Scores&&, bool) const {}
  template <bool kFinite>
  CUTE_DEVICE static float derivative(float) {
    return 1.f;
  }
};

template <class First, class... Others>
struct ModifierList<First, Others...> {
  using Rest = ModifierList<Others...>;
  static constexpr bool kHasMap = First::kIsMap || Rest::kHasMap;
  static constexpr bool kHasTerm = !First::kIsMap || Rest::kHasTerm;
  static_assert(First::kIsMap || !Rest::kHasMap, "maps stand before terms");
  static_assert(!First::kIsMap || !Rest::kHasMap,
                "a second map would overwrite what the derivative of the first is computed from");
  using Terms = std::conditional_t<
      First::kIsMap, typename Rest::Terms,
      std::conditional_t<Rest::kHasTerm, SumOfTerms<First, typename Rest::Terms>, First>>;
  First first;
  Rest rest;

  template <class Params>
  CUTE_DEVICE ModifierList(Params const& params, float unit)
      : first(params, unit), rest(params, First::unit_after(params, unit)) {}

  // The unit of the scores after the modifiers.
  template <class Params>
  CUTE_DEVICE static float unit_after(Params const& params, float unit) {
    return Rest::unit_after(params, First::unit_after(params, unit));
  }

  // Whether the map of the list, if it has one, has an easy way for all scores of the warp, which
  // calls this together.
  template <class Scores>
  CUTE_DEVICE bool all_near(Scores const& scores) const {
    if constexpr (First::kIsMap) {
      return first.all_near(scores);
    } else {
      return rest.all_near(scores);
    }
  }

  // Applies the map to scores (ROWS, COLS) or (COLS), in groups of kGroup.
  //   near  all_near() of these scores, or of more
  template <int kGroup, class Scores>
  CUTE_DEVICE void map(Scores&& scores, bool near) const {
    if constexpr (First::kIsMap) {
      first.template map<kGroup>(scores, near);
    } else {
      rest.template map<kGroup>(scores, near);
    }
  }

  // d(modified score) / d(scale * q.k), from `mapped`, the score after all maps of the list.
  //   kFinite  whether no mapped score is infinite, as one is that a mask has set to -infinity
  template <bool kFinite>
  CUTE_DEVICE float derivative(float mapped) const {
    if constexpr (First::kIsMap) {
      return first.template derivative<kFinite>(mapped) * rest.template derivative<kFinite>(mapped);
    } else {
      return rest.template derivative<kFinite>(mapped);
    }
  }
};

// The list of those candidates whose bits are in kSet, after those that are chosen already.
template <uint32_t kSet, class Chosen, class... Candidates>
struct ChosenModifiers {
  using List = Chosen;
};
template <uint32_t kSet, class... Chosen, class First, class... Others>
struct ChosenModifiers<kSet, ModifierList<Chosen...>, First, Others...> {
  using Extended = std::conditional_t<(kSet & First::kBit) != 0, ModifierList<Chosen..., First>,
                                      ModifierList<Chosen...>>;
  using List = typename ChosenModifiers<kSet, Extended, Others...>::List;
};

// Softcap of a row: with ALiBi there are no registers for coefficients.
template <uint32_t kSet>
using SoftcapOf =
    std::conditional_t<(kSet & score_mods::Alibi) == 0, SoftcapMap, SoftcapMapBy<PlainPolynomial>>;

// All modifiers, in the order of docs/design.md: those of `kSet`. Kernels with several have fewer
// registers for each.
template <uint32_t kSet, bool kOptional>
using ListOfModifiers = std::conditional_t<
    kOptional,
    typename ChosenModifiers<kSet, ModifierList<>, OptionalMap<SoftcapMapBy<PlainPolynomial>>,
                             OptionalTerm<AlibiTermOf<false>>, OptionalTerm<BiasTerm>>::List,
    typename ChosenModifiers<kSet, ModifierList<>, SoftcapOf<kSet>,
                             AlibiTermOf<(kSet & score_mods::Softcap) == 0>, BiasTerm>::List>;

// The modifiers of a row, from its set of score_mods.
//   kElsewhere  those of the set that the kernel applies by itself
template <uint32_t kScoreMods, uint32_t kElsewhere = score_mods::None>
struct ScoreModifiers : ListOfModifiers<kScoreMods & ~kElsewhere, serves_subsets(kScoreMods)> {
  static_assert((kScoreMods & ~(score_mods::Every | score_mods::Qv)) == 0, "members of score_mods");
  using List = ListOfModifiers<kScoreMods & ~kElsewhere, serves_subsets(kScoreMods)>;

  template <class Params>
  CUTE_DEVICE explicit ScoreModifiers(Params const& params) : List(params, params.scale) {}

  // The softmax sees a modified score y as exp(exponent_scale * y).
  template <class Params>
  CUTE_DEVICE static float exponent_scale(Params const& params) {
    return List::unit_after(params, params.scale);
  }
};

// Scores (ROWS, COLS), modified, in groups of kGroup, and masked by mask(), if there is a mask.
// Where a map takes a group of scores together, it sees hidden ones as -infinity: they may be of
// keys that are not the sequence's, and must not reach others through their group.
//   add_terms()  adds the terms of the modifiers, if they have any
template <int kGroup, class Modifiers, class Scores, class Mask, class AddTerms>
CUTE_DEVICE void modify_and_mask(Modifiers const& modifiers, Scores& scores, bool masked,
                                 Mask const& mask, AddTerms const& add_terms) {
  bool const near = modifiers.all_near(scores);
  if (Modifiers::kHasMap && kGroup > 1 && masked && !near) {
    mask();
  }
  modifiers.template map<kGroup>(scores, near);
  if constexpr (Modifiers::kHasTerm) {
    add_terms();
  }
  if (masked) {
    mask();
  }
}

}  // namespace cute_attention
