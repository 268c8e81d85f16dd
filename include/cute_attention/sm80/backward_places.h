// sm80/backward_places.h: what the backward kernel does to the scores of a step by their place:
// biases and other terms, masks, dropout.
#pragma once

#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/sm80/backward_bias.h"
#include "cute_attention/sm80/backward_traits.h"

namespace cute_attention::sm80 {

// The block of keys of a CTA, and the places of its scores.
template <class Row>
struct BackwardPlaces {
  using Traits = BackwardTraits<Row>;
  using Step = BackwardStep<typename Traits::Element>;
  using Scores = BackwardScores<Row::kKey.score_mods>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  BackwardParams const& params;
  typename Traits::SharedMemory& shared;
  GradTile const tile;
  Sequence const sequence;
  int const n_begin;  // first key of the block
  MTiles const tiles;
  int const thread;

  CUTE_DEVICE BackwardPlaces(BackwardParams const& params, typename Traits::SharedMemory& shared,
                             GradTile const& tile)
      : params(params),
        shared(shared),
        tile(tile),
        sequence(load_sequence(params, tile.batch)),
        n_begin(tile.n_block * kTileN),
        tiles(m_tiles(sequence, n_begin, kTileN, kTileM)),
        thread(int(threadIdx.x)) {}

  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class ScoresT>
  CUTE_DEVICE auto score_tile(Step const& step, ScoresT& tSrS, QueryPacking const& packing) const {
    return make_score_tile_of_transpose<kTileM, kTileN>(typename Traits::TiledMmaS{},
                                                        opaque(thread), tSrS, sequence, packing,
                                                        step.m_block * kTileM, n_begin);
  }

  // The terms of the modifiers for a step, for scores.begin() and scores.finish().
  template <class ScoresT>
  CUTE_DEVICE auto terms_of(Step const& step, ScoresT& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    return Scores::terms(Scores::of_head(params, tile.batch, step.head),
                         [&] { return score_tile(step, tSrS, packing); });
  }

  // Starts the copies of the bias of a step, where P of the last step was.
  CUTE_DEVICE void load_bias(Step const& step) const {
    if constexpr (Scores::kTermsInScores) {
      BackwardBias<Traits>::load(params, sequence, tile.batch, step, n_begin, shared.p,
                                 opaque(thread));
    }
  }

  // Adds the bias of a step to its scores.
  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class ScoresT>
  CUTE_DEVICE void add_bias(Step const& step, ScoresT& tSrS) const {
    if (has_bias_tiles(params, sequence)) {
      BackwardBias<Traits>::add(params, shared.p, opaque(thread), tSrS);
    } else {
      QueryPacking const packing = unpacked_queries();
      Scores::template add_terms<typename Traits::Element>(
          params, Scores::of_head(params, tile.batch, step.head), score_tile(step, tSrS, packing));
    }
  }

  // Sets hidden scores, and those of queries past the end of the sequence, to -infinity.
  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class ScoresT>
  CUTE_DEVICE void mask(Step const& step, ScoresT& tSrS) const {
    if (tiles.masked(step.m_block)) {
      QueryPacking const packing = unpacked_queries();
      auto const tile = score_tile(step, tSrS, packing);
      mask_scores_by_side(tile);
      if ((step.m_block + 1) * kTileM > sequence.seqlen_q) {
        mask_missing_queries(tile);
      }
    }
  }

  // Which scores of block `k` of queries and `n` of keys are kept.
  template <class ScoresT>
  CUTE_DEVICE auto kept_block_of(Step const& step, int stage, int n, int k, ScoresT& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    return kept_block_of_transpose(score_tile(step, tSrS, packing),
                                   KeepTest(uint32_t(params.dropout.drop_count)),
                                   shared.dropout[stage].words, n, k);
  }
};

}  // namespace cute_attention::sm80
