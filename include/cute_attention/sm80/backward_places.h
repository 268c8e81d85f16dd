// sm80/backward_places.h: what the backward kernel does to the scores of a step by their place:
// biases and other terms, masks, dropout.
#pragma once

#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/call_features.h"
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

// The block of keys of a CTA, the part of its steps that the CTA has, and the places of their
// scores.
template <class Row>
struct BackwardPlaces {
  using Traits = BackwardTraits<Row>;
  using Step = BackwardStep<typename Traits::Element>;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Scores = BackwardScores<kScoreMods>;
  using OtherScores = BackwardScores<kScoreMods, score_mods::Bias>;  // with all terms but the bias
  static_assert(Scores::kModifiesCopies == Traits::kHasBiasBuffer, "the bias outlives S^T");
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  BackwardParams const& params;
  typename Traits::SharedMemory& shared;
  GradTile const tile;
  int32_t const parts;  // of a block of keys
  Sequence const sequence;
  int const n_begin;  // first key of the block
  MTiles const tiles;
  StepRange const range;
  int const thread;

  CUTE_DEVICE BackwardPlaces(BackwardParams const& params, typename Traits::SharedMemory& shared,
                             GradTile const& tile, StepParts const& parts)
      : params(params),
        shared(shared),
        tile(tile),
        parts(parts.count),
        sequence(load_sequence(params, tile.batch)),
        n_begin(tile.n_block * kTileN),
        tiles(m_tiles(sequence, n_begin, kTileN, kTileM)),
        range(steps_of_part(tiles, tile, parts)),
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

  // Starts the copies of the bias of a step, when its place is free.
  CUTE_DEVICE void load_bias(Step const& step) const {
    if constexpr (Scores::kTermsInScores) {
      BackwardBias<Traits>::load(params, sequence, tile.batch, step, n_begin, shared,
                                 opaque(thread));
    }
  }

  // Adds the bias of a step to its scores. If it is a tile, await() waits for it.
  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class ScoresT, class Await>
  CUTE_DEVICE void add_bias(Step const& step, ScoresT& tSrS, Await const& await) const {
    if (has_bias_tiles<kScoreMods>(params, sequence)) {
      await();
      BackwardBias<Traits>::add(Scores::Modifiers::exponent_scale(params), shared, opaque(thread),
                                tSrS);
    } else {
      QueryPacking const packing = unpacked_queries();
      add_terms<Scores>(step, score_tile(step, tSrS, packing));
    }
  }

  // Makes a copy of the scores of block `k` of 16 queries, with terms and masked.
  //   tSrS    (MMA, MMA_N, MMA_M)  what scores.begin() left
  //   copies  (MMA, MMA_N, 2)
  template <class ScoresT, class Copies>
  CUTE_DEVICE void modify_copies(Step const& step, int k, ScoresT& tSrS, Copies& copies) const {
    QueryPacking const packing = unpacked_queries();
    auto const all = score_tile(step, tSrS, packing);
    auto const block = copies_of_scores<4, decltype(all)::kCols>(all, 4 * k, 0, copies);
    if (has_bias_tiles<kScoreMods>(params, sequence)) {
      BackwardBias<Traits>::add_to_copies(Scores::Modifiers::exponent_scale(params), shared,
                                          opaque(thread), k, copies);
      add_terms<OtherScores>(step, block);
    } else {
      add_terms<Scores>(step, block);
    }
    mask(step, [&] { return block; });
  }

  // Sets hidden scores, and those of queries past the end of the sequence, to -infinity.
  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class ScoresT>
  CUTE_DEVICE void mask_all(Step const& step, ScoresT& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    mask(step, [&] { return score_tile(step, tSrS, packing); });
  }

  // Of block `k` of 16 queries, makes dP + delta of dropped scores delta.
  //   tSrS    (MMA, MMA_N, MMA_M)  whose places decide
  //   tdPrdP  (MMA, MMA_N)         dP + delta of the block, as an A operand
  //   sDelta  (MMA, MMA_N)         delta of the same scores
  template <class ScoresT, class Gradients, class Deltas>
  CUTE_DEVICE void drop_gradients(Step const& step, int stage, int k, ScoresT& tSrS,
                                  Gradients&& tdPrdP, Deltas const& sDelta) const {
    if constexpr (kDrops) {
      if (call_has<kScoreMods, score_mods::Dropout>(params)) {
        replace_dropped(tdPrdP, sDelta,
                        [&](int n) { return kept_block_of(step, stage, n, k, tSrS); });
      }
    }
  }

  // Of the same block, clears dropped probabilities.
  //   rP  (MMA, MMA_N)  in 16 bits, as an A operand
  template <class ScoresT, class Probabilities>
  CUTE_DEVICE void drop_probabilities(Step const& step, int stage, int k, ScoresT& tSrS,
                                      Probabilities& rP) const {
    if constexpr (kDrops) {
      if (call_has<kScoreMods, score_mods::Dropout>(params)) {
        CUTE_UNROLL
        for (int n = 0; n < cute::size<1>(rP); ++n) {
          kept_block_of(step, stage, n, k, tSrS).drop(rP(cute::_, n));
        }
      }
    }
  }

 private:
  static constexpr bool kDrops = has_dropout(kScoreMods);

  // Which scores of block `k` of queries and `n` of keys are kept.
  template <class ScoresT>
  CUTE_DEVICE auto kept_block_of(Step const& step, int stage, int n, int k, ScoresT& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    return kept_block_of_transpose(score_tile(step, tSrS, packing),
                                   KeepTest(uint32_t(params.dropout.drop_count)),
                                   shared.dropout[stage].words, n, k);
  }

  template <class SomeScores, class ScoreTile>
  CUTE_DEVICE void add_terms(Step const& step, ScoreTile const& scores) const {
    SomeScores::template add_terms<typename Traits::Element>(
        params, SomeScores::of_head(params, tile.batch, step.head), scores);
  }

  //   scores()  describes the scores (score_tile.h)
  template <class ScoreTileOf>
  CUTE_DEVICE void mask(Step const& step, ScoreTileOf const& scores) const {
    if (tiles.masked(step.m_block)) {
      auto const tile = scores();
      mask_scores_by_side(tile);
      if ((step.m_block + 1) * kTileM > sequence.seqlen_q) {
        mask_missing_queries(tile);
      }
    }
  }
};

}  // namespace cute_attention::sm80
