// sm90/backward_factors.h: the factors of dS in rows with softcap: what dP + delta is multiplied
// with, P times the derivative of softcap. And what the pointwise work of all rows knows.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/placed_scores.h"

namespace cute_attention::sm90 {

// A base class of BackwardPointwise, whose begin() and finish() call these functions. It also has
// what both classes need: the types and layouts of scores, and the thread they are of.
template <class Row>
struct BackwardFactors {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Scores =
      BackwardScores<kScoreMods,
                     Traits::kBiasTiles || Traits::kKeyBias ? score_mods::Bias : score_mods::None,
                     true>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr bool kDrops = has_dropout(kScoreMods);
  // Whether the accumulators of dP begin with delta. Under dropout dS is kept P * dP + P * delta:
  // there finish() adds delta, and P that is cleared once serves dV and dS. To let delta take the
  // place of dP where a score is dropped takes as many instructions, and registers that steps of
  // 128 queries do not have. In chunks, and with kTellsLate, it is added to dP: backward_chunks.h
  // and backward_compute.h say why.
  static constexpr bool kStartsWithDelta = !kDrops && !Traits::kInChunks && !Traits::kTellsLate;
  using FragmentS = decltype(cute::partition_fragment_C(
      typename Traits::MmaS{}, cute::Shape<cute::Int<kTileN>, cute::Int<kTileM>>{}));
  using Operand = decltype(cute::make_tensor<Element>(as_a_operand(FragmentS{}.layout())));

  static_assert(!Scores::kModifiesCopies || !Traits::kBiasOfWarpgroups,
                "take_copies() reads tiles that come with Q");
  // With kModifiesCopies begin() rounds P, and leaves in scores what dP + delta is multiplied with:
  // P times the derivative of a map. Its sign says that its score is dropped: neither is negative
  // but for the rounding of a derivative of 0, where either reading gives next to nothing. It does
  // so for these of a step's blocks of 16 queries, and finish() for the others. At head dim 128
  // registers do not hold all of P in 16 bits beside dP, and none of it where a thread has the
  // addresses of a bias in global memory.
  static constexpr int kBlocks = kTileM / 16;
  static constexpr int kBlocksFirst = Traits::kHeadDim <= 64 ? kBlocks
                                      : Traits::kBiasTiles   ? kBlocks / 2
                                                             : 0;
  // With a map and without copies begin() rounds P too, and leaves P times the derivative in
  // scores: so the exponentials run beside dP. ptxas spilled where they waited for dP, as they do
  // for the other rows.
  static constexpr bool kTakesFactors =
      Scores::Modifiers::kHasMap && !Scores::kModifiesCopies && !kDrops;

  BackwardArguments const& arguments;
  typename Traits::SharedMemory& shared;
  int const thread;  // of the consumers
  Scores const scores;

  CUTE_DEVICE BackwardFactors(BackwardArguments const& arguments,
                              typename Traits::SharedMemory& shared, int thread)
      : arguments(arguments), shared(shared), thread(thread), scores(arguments.params) {}

 protected:
  CUTE_DEVICE PlacedScores<Traits, Scores> placed() const { return {arguments.params, thread}; }

  // Makes P of the mapped and masked scores of block `k`, and these factors.
  //   sLse   (KEYS, QUERIES)
  //   tSrS   (MMA, MMA_N, MMA_M)
  //   tdVrP  (MMA, MMA_N, MMA_M / 16)  its block `k` becomes P in 16 bits
  template <class Terms, class Lse>
  CUTE_DEVICE void take_factors(int k, Terms const& terms, Lse const& sLse, FragmentS& tSrS,
                                Operand& tdVrP) const {
    using namespace cute;
    Tensor rP = make_tensor<float>(Int<8>{});  // (8)
    CUTE_UNROLL
    for (int i = 8 * k; i < 8 * k + 8; ++i) {
      int const query = 4 * k + i % 8 / 4 * 2 + i % 2, key = i / 2 % 2;
      rP(i % 8) = tSrS(i);
      tSrS(i) = scores.factor(rP(i % 8), sLse(0, query), terms.of_query(query), key);
    }
    auto of_block = tdVrP(_, 0, k);  // (MMA)
    convert_into(rP, of_block);
  }

  // Clears what is dropped of block `k` of P, and gives its factors their signs.
  //   tile     the scores, which have become factors
  //   words    (M)  the random words of the tile's queries
  //   factors  (MMA, MMA_N, MMA_M)
  //   tdVrP    (MMA, MMA_N, MMA_M / 16)
  template <class Tile>
  CUTE_DEVICE static void drop_block(Tile const& tile, KeepTest const& test, uint32_t const* words,
                                     int k, FragmentS& factors, Operand& tdVrP) {
    auto const kept = kept_block_of_transpose(tile, test, words, 0, k);
    kept.drop(tdVrP(cute::_, 0, k));
    CUTE_UNROLL
    for (int i = 8 * k; i < 8 * k + 8; ++i) {
      factors(i) = kept.keeps(i % 8) ? factors(i) : -factors(i);
    }
  }

  // Makes P of mapped scores, and mapped scores factors, of one block of 16 queries after the
  // other: of a block registers hold a copy of the scores, with terms and masked
  // (backward_scores.h).
  //   first, end  the first of the blocks, and the one after the last
  //   tSrS        (MMA, MMA_N, MMA_M)
  //   tdVrP       (MMA, MMA_N, MMA_M / 16)  becomes P in 16 bits
  CUTE_DEVICE void take_copies(BackwardWork const& work, uint32_t stage_index, int first, int end,
                               FragmentS& tSrS, Operand& tdVrP) const {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    auto const& stage = shared.stages[stage_index];
    QueryPacking const packing = unpacked_queries();
    auto const tile = placed().tile(work, stage.m_block, tSrS, packing);
    KeepTest const test(uint32_t(params.dropout.drop_count));
    Tensor sLse = row_numbers<Traits>(thread, shared.lse[stage_index]);  // (MMA, MMA_N, MMA_M)
    uint32_t const first_bias =
        first_bias_offset<BiasOfTranspose, kTileM>(arguments.bias, 0, opaque(thread));
    float const per_unit =
        bias_per_unit(params, work.sequence, Scores::Modifiers::exponent_scale(params));
    CUTE_UNROLL
    for (int k = first; k < end; ++k) {
      Tensor rZ = make_tensor<float>(Int<8>{});  // (8), in the order of the accumulator
      auto const copies = copies_of_scores<4, 2>(tile, 4 * k, 0, rZ);
      if constexpr (Traits::kBiasTiles) {
        if (call_has<kScoreMods, score_mods::Bias>(params)) {
          add_bias_step<BiasOfTranspose, kTileM>(arguments.bias, shared.bias_tile(stage_index),
                                                 first_bias, per_unit, k, rZ);
        }
      }
      Scores::template add_terms<Element>(params, stage, copies);
      placed().mask_copies(work, stage.m_block, copies);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        float probability = tSrS(8 * k + i);
        tSrS(8 * k + i) = scores.factor(probability, rZ(i), sLse(8 * k + i));
        rZ(i) = probability;
      }
      auto rP = tdVrP(_, 0, k);  // (MMA)
      convert_into(rZ, rP);
      if constexpr (kDrops) {
        if (call_has<kScoreMods, score_mods::Dropout>(params)) {
          drop_block(tile, test, stage.words, k, tSrS, tdVrP);
        }
      }
    }
  }

  // Makes dP of block `k`, as it is for finish(), dS, from factors.
  //   tSrS, tdPrdP  (MMA, MMA_N, MMA_M)
  CUTE_DEVICE void finish_factors(uint32_t stage_index, int k, FragmentS const& tSrS,
                                  FragmentS& tdPrdP) const {
    using namespace cute;
    Tensor sDelta = row_numbers<Traits>(thread, shared.delta[stage_index]);  // (MMA, MMA_N, MMA_M)
    CUTE_UNROLL
    for (int i = 8 * k; i < 8 * k + 8; ++i) {
      float const factor = fabsf(tSrS(i));
      if constexpr (kStartsWithDelta) {
        tdPrdP(i) *= factor;
      } else {
        tdPrdP(i) = fmaf(fmaxf(tSrS(i), 0.f), tdPrdP(i), factor * sDelta(i));
      }
    }
  }
};

}  // namespace cute_attention::sm90
