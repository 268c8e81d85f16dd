// sm80/grad_bias_scores.h: what the kernel for the gradient of a bias does to the numbers of a tile
// of scores between its products: modifiers, masks, probabilities, dropout.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/grad_bias_scores.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm80/bias_tile.h"
#include "cute_attention/sm80/grad_bias_traits.h"

namespace cute_attention::sm80 {

template <class RowTraits>
struct GradBiasScores {
  using Traits = RowTraits;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Bias = BiasTile<Element, typename Traits::SmemLayoutBias, kSwizzleCols<Traits::kTileN>>;
  static constexpr uint32_t kScoreMods = Traits::kKey.score_mods;
  using Scores = BackwardScores<kScoreMods>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  using FragmentS = decltype(cute::partition_fragment_C(
      typename Traits::TiledMma{}, cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{}));

  BackwardParams const& params;
  SharedMemory& shared;
  int const thread;
  Scores const scores;

  CUTE_DEVICE GradBiasScores(BackwardParams const& params, SharedMemory& shared)
      : params(params), shared(shared), thread(int(threadIdx.x)), scores(params) {}

  CUTE_DEVICE Sequence sequence_of(ScoreBlock const& block) const {
    return load_sequence(params, block.batch);
  }

  // The random words of the rows of a tile, for dropout.
  CUTE_DEVICE void write_words(ScoreBlock const& block) const {
    if constexpr (Traits::kDrops) {
      if (thread < shared.tiles.kWriters && call_has<kScoreMods, score_mods::Dropout>(params)) {
        shared.tiles.write(params, block.batch, block.head, block.m_block * kTileM, thread);
      }
    }
  }

  // Gives each number of a tile its row's number.
  CUTE_DEVICE void start_with(float const (&numbers)[kTileM], FragmentS& fragment) const {
    auto rS = view(fragment);     // (ROWS, COLS)
    auto const cS = tile_rows();  // (ROWS)
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(rS); ++row) {
      float const number = numbers[int(cute::get<0>(cS(row)))];
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(rS); ++col) {
        rS(row, col) = number;
      }
    }
  }

  // Makes scores probabilities.
  //   tSrS  (MMA, MMA_M, MMA_N)
  CUTE_DEVICE void take_probabilities(ScoreBlock const& block, FragmentS& tSrS) const {
    using TiledMma = typename Traits::TiledMma;
    Sequence const sequence = sequence_of(block);
    int32_t const m_begin = block.m_block * kTileM;
    QueryPacking const packing = unpacked_queries();
    auto const tile = make_score_tile<kTileM, kTileN>(TiledMma{}, opaque(thread), tSrS, sequence,
                                                      packing, m_begin, block.n_block * kTileN);
    modify_scores<Element>(params, scores, block, tile,
                           has_bias_tiles<kScoreMods>(params, sequence), [&](float unit) {
                             Bias(shared.tiles.bias.data())
                                 .template add<TiledMma, false>(tSrS, 1.f / unit, opaque(thread));
                           });
    if (kv_tiles(sequence, m_begin, kTileM, kTileN).masked(block.n_block)) {
      mask_scores_by_side(tile);
    }
    if (m_begin + kTileM > sequence.seqlen_q) {
      mask_missing_queries(tile);
    }
    auto rS = view(tSrS);         // (ROWS, COLS)
    auto const cS = tile_rows();  // (ROWS)
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(rS); ++row) {
      float const& lse = shared.tiles.lse[int(cute::get<0>(cS(row)))];
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(rS); ++col) {
        rS(row, col) = scores.probability(rS(row, col), lse, NoTerms{}, col);
      }
    }
  }

  // Drops what the probabilities of dropped scores give to dP + delta.
  //   tdPrdP  (MMA, MMA_M, MMA_N)
  CUTE_DEVICE void drop(ScoreBlock const& block, FragmentS& tdPrdP) const {
    if constexpr (Traits::kDrops) {
      if (call_has<kScoreMods, score_mods::Dropout>(params)) {
        Sequence const sequence = sequence_of(block);
        QueryPacking const packing = unpacked_queries();
        auto const tile = make_score_tile<kTileM, kTileN>(
            typename Traits::TiledMma{}, opaque(thread), tdPrdP, sequence, packing,
            block.m_block * kTileM, block.n_block * kTileN);
        drop_gradients(tile, params.dropout, shared.tiles.words, shared.tiles.delta);
      }
    }
  }

 private:
  // (ROWS, COLS) of an accumulator of S.
  CUTE_DEVICE static auto view(FragmentS& tSrS) {
    return cute::make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));
  }

  // The row in the tile of each row of an accumulator: (ROWS).
  CUTE_DEVICE auto tile_rows() const {
    using namespace cute;
    Tensor tScS =  // (MMA, MMA_M, MMA_N)
        typename Traits::TiledMma{}
            .get_slice(opaque(thread))
            .partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
    return make_tensor(tScS.data(), rows_and_columns(tScS.layout()))(_, _0{});
  }
};

}  // namespace cute_attention::sm80
