// sm90/placed_scores.h: what the backward kernels do to scores of a step by their place in the
// tile: terms, masks and dropout, of accumulators of S^T.
#pragma once

#include "cute_attention/core/call_features.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/sm90/backward_traits.h"

namespace cute_attention::sm90 {

//   Traits  BackwardTraits or GradKvTraits
//   Scores  a BackwardScores
// Below, `stage` has what the modifiers need to know of the queries (BackwardStage).
template <class Traits, class Scores>
struct PlacedScores {
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  BackwardParams const& params;
  int const thread;  // of those that share MmaS

  // The scores as a tile (score_tile.h).
  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class FragmentS>
  CUTE_DEVICE auto tile(BackwardWork const& work, int m_block, FragmentS& tSrS,
                        QueryPacking const& packing) const {
    return make_score_tile_of_transpose<kTileM, kTileN>(
        typename Traits::MmaS{}, opaque(thread), tSrS, work.sequence, packing, m_block * kTileM,
        work.tile.n_block * kTileN);
  }

  // The terms in exponents of a step, for begin(), finish() and factor() of BackwardScores.
  template <class Stage, class FragmentS>
  CUTE_DEVICE auto terms(BackwardWork const& work, Stage const& stage, FragmentS& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    return Scores::terms(stage, [&] { return tile(work, stage.m_block, tSrS, packing); });
  }

  // Adds the terms that scores have, and not exponents.
  template <class Stage, class FragmentS>
  CUTE_DEVICE void add_terms(BackwardWork const& work, Stage const& stage, FragmentS& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    Scores::template add_terms<typename Traits::Element>(params, stage,
                                                         tile(work, stage.m_block, tSrS, packing));
  }

  // Hides scores, and those of queries past the end of the sequence: they become Scores::kHidden.
  template <class FragmentS>
  CUTE_DEVICE void mask(BackwardWork const& work, int m_block, FragmentS& tSrS) const {
    mask(work.tiles.masked(m_block), work, m_block, tSrS);
  }
  //   masked  whether there are any, as work.tiles says
  template <class FragmentS>
  CUTE_DEVICE void mask(bool masked, BackwardWork const& work, int m_block, FragmentS& tSrS) const {
    if (masked) {
      QueryPacking const packing = unpacked_queries();
      mask_tile(work, m_block, tile(work, m_block, tSrS, packing));
    }
  }

  // The same for copies of some of them (copies_of_scores()).
  template <class Copies>
  CUTE_DEVICE void mask_copies(BackwardWork const& work, int m_block, Copies const& copies) const {
    if (work.tiles.masked(m_block)) {
      mask_tile(work, m_block, copies);
    }
  }

  // Which scores are kept, of all of a thread's.
  template <class Stage, class FragmentS>
  CUTE_DEVICE auto kept(BackwardWork const& work, Stage const& stage, FragmentS& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    if (!call_has<Traits::kKey.score_mods, score_mods::Dropout>(params)) {
      return KeptBlocks<Rows::Keys, cute::size(FragmentS{})>(
          [](int) { return KeptBlock<Rows::Keys>{{~0u, ~0u}}; });
    }
    return kept_blocks_of_transpose(tile(work, stage.m_block, tSrS, packing), params.dropout,
                                    stage.words);
  }

 private:
  template <class Tile>
  CUTE_DEVICE static void mask_tile(BackwardWork const& work, int m_block, Tile const& tile) {
    mask_scores_by_side(tile, Scores::kHidden);
    if ((m_block + 1) * kTileM > work.sequence.seqlen_q) {
      mask_missing_queries(tile, Scores::kHidden);
    }
  }
};

}  // namespace cute_attention::sm90
