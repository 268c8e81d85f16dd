// sm90/forward_scores.h: the scores of a consumer warpgroup's 64 queries, and their softmax.
//
// Full tiles of the smaller head dims do without a maximum of their own (core/online_softmax.h,
// exponentiate_apart): there softmax takes as long as the products.
#pragma once

#include "cute_attention/core/mask.h"
#include "cute_attention/core/online_softmax.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_mod.h"
#include "cute_attention/sm90/forward_store.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/score_again.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardScores {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kTileN = Traits::kTileN;

  using TileS = cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileN>>;
  using FragmentS = decltype(cute::partition_fragment_C(typename Traits::MmaQK{}, TileS{}));
  using Softmax = OnlineSoftmax<2>;
  using Modifier = ScoreModifier<Row::kKey.score_mod>;
  static constexpr int kModifierGroup = Traits::kHeadDimV > 128 ? 1 : 4;  // where registers are few

  ForwardArguments const& arguments;
  int const warpgroup;  // of the consumers
  int const thread;     // of the warpgroup

  FragmentS tSrS;  // (MMA, MMA_M, MMA_N): S, then P
  Softmax softmax;

  CUTE_DEVICE ForwardScores(ForwardArguments const& arguments, int warpgroup, int thread)
      : arguments(arguments),
        warpgroup(warpgroup),
        thread(thread),
        softmax(Modifier::exponent_scale(arguments.params)) {}

  // First row of this warpgroup in its tile.
  CUTE_DEVICE int m_offset() const { return warpgroup * kWarpgroupM; }

  // P of the first KV tile of a walk. `full`: every query sees every key of it.
  CUTE_DEVICE void first(ForwardTile const& tile, int32_t n_block, bool full) {
    modify();
    if (!full) {
      mask(tile, n_block);
    }
    softmax = Softmax(Modifier::exponent_scale(arguments.params));
    typename Softmax::Rows factors;
    softmax.template update_max_lazily<true>(view(), factors);
    softmax.exponentiate(view());
  }

  // P of a later one. Returns whether O must be multiplied by `factors`; the warp agrees. Without
  // kMasked every query sees every key of it, and it lies left of settled_end().
  template <bool kMasked>
  CUTE_DEVICE bool next(ForwardTile const& tile, int32_t n_block, typename Softmax::Rows& factors) {
    modify();
    if constexpr (kMasked) {
      mask(tile, n_block);
    }
    if constexpr (!kMasked && Traits::kOptimistic) {
      return next_settled(tile, n_block, factors);
    } else {
      bool const rescale = softmax.template update_max_lazily<kMasked>(view(), factors);
      softmax.exponentiate(view());
      return rescale;
    }
  }

  // The KV tile of the first query's last key: left of it, every query that sees a whole tile has
  // seen a key before, and so has a maximum. No limit where that does not matter.
  CUTE_DEVICE int32_t settled_end(ForwardTile const& tile) const {
    if constexpr (Traits::kOptimistic) {
      int32_t const first_query = tile.m_begin + arguments.packing.query(m_offset());
      return min_of(first_query + tile.sequence.last_offset, tile.sequence.seqlen_k - 1) / kTileN;
    } else {
      return tile.kv.end;
    }
  }

 private:
  // (ROWS, COLS)
  CUTE_DEVICE auto view() {
    return cute::make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));
  }

  CUTE_DEVICE void modify() { Modifier(arguments.params).template modify<kModifierGroup>(view()); }

  CUTE_DEVICE void mask(ForwardTile const& tile, int32_t n_block) {
    using namespace cute;
    typename Traits::MmaQK mma;
    Tensor tScS = mma.get_slice(opaque(thread))
                      .partition_C(make_identity_tensor(TileS{}));          // (MMA, MMA_M, MMA_N)
    Tensor cS = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));  // (ROWS, COLS)
    auto rS = view();
    QueryPacking const& packing = arguments.packing;
    mask_scores_by_side<kWarpgroupM, kTileN>(
        rS, cS, tile.sequence, tile.m_begin + packing.query(m_offset()), n_block * kTileN, packing);
  }

  // With the maximum so far, until the sums show that it will not do.
  CUTE_DEVICE bool next_settled(ForwardTile const& tile, int32_t n_block,
                                typename Softmax::Rows& factors) {
    auto sums = softmax.template exponentiate_apart<Traits::kSumChains>(view());
    bool const outgrown = softmax.outgrown(sums);
    if (__builtin_expect(outgrown, false)) {
      if (softmax.lost(sums)) {
        score_again<Element>(arguments, tile, m_offset() + row_of_thread(thread), n_block * kTileN,
                             thread, view());
        softmax.template update_max_lazily<false>(view(), factors);
        sums = softmax.template exponentiate_apart<Traits::kSumChains>(view());
      } else {
        factors = softmax.catch_up(view(), sums);
      }
    }
    softmax.add(sums);
    return outgrown;
  }
};

}  // namespace cute_attention::sm90
