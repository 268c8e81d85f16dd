// sm90/backward_pointwise.h: the pointwise work of a step of the backward kernel: P and dS of this
// thread's scores, from the products S and dP.
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

// A base class of the one that computes products. With a member in its place the instructions are
// the same, and those of rows with every modifier come in another order.
template <class Row>
struct BackwardPointwise {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Scores =
      BackwardScores<kScoreMods,
                     Traits::kBiasTiles || Traits::kKeyBias ? score_mods::Bias : score_mods::None,
                     true>;
  using KeyBiasNumbers = std::conditional_t<Traits::kKeyBias, KeyBiasOfStep, NoKeyBias>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr bool kDrops = has_dropout(kScoreMods);
  // Whether the accumulators of dP begin with delta. Under dropout dS is kept P * dP + P * delta:
  // there finish() adds delta, and P that is cleared once serves dV and dS. To let delta take the
  // place of dP where a score is dropped takes as many instructions, and registers that steps of
  // 128 queries do not have. In chunks, and with kTellsLate, it is added to dP: backward_chunks.h
  // and backward_compute.h say why.
  static constexpr bool kStartsWithDelta = !kDrops && !Traits::kInChunks && !Traits::kTellsLate;
  // For how many columns of S a thread may load the LSE ahead, where it has a limit. Without one
  // ptxas loads all of it first, and spills where a kernel leaves few registers.
  static constexpr int kLseAhead = 16;

  using FragmentS = decltype(cute::partition_fragment_C(
      typename Traits::MmaS{}, cute::Shape<cute::Int<kTileN>, cute::Int<kTileM>>{}));
  using FragmentP = decltype(cute::partition_fragment_C(  // of a chunk of the queries
      typename Traits::MmaP{}, cute::Shape<cute::Int<kTileN>, cute::Int<Traits::kChunkM>>{}));
  using Operand = decltype(cute::make_tensor<Element>(as_a_operand(FragmentS{}.layout())));

  BackwardArguments const& arguments;
  typename Traits::SharedMemory& shared;
  int const thread;  // of the consumers
  Scores const scores;

  CUTE_DEVICE BackwardPointwise(BackwardArguments const& arguments,
                                typename Traits::SharedMemory& shared, int thread)
      : arguments(arguments), shared(shared), thread(thread), scores(arguments.params) {}

  // The LSE of the thread's scores of a step: (KEYS, QUERIES), in shared memory.
  CUTE_DEVICE auto lse(uint32_t stage_index) const {
    using namespace cute;
    int const lane = Traits::kInChunks ? opaque(thread) : thread;          // few registers
    Tensor tSsLse = row_numbers<Traits>(lane, shared.lse[stage_index]);    // (MMA, MMA_N, MMA_M)
    return make_tensor(tSsLse.data(), rows_and_columns(tSsLse.layout()));  // (KEYS, QUERIES)
  }

  // What a step asks for before S is there, with kAsksEarly; in other rows nothing.
  struct Asked {
    float lse_of_query[kTileM / 4];  // of the thread's queries
    bool masked;                     // whether the step's tile has hidden scores
    CUTE_DEVICE float const& operator()(int, int query) const { return lse_of_query[query]; }
  };
  struct NothingAsked {};
  CUTE_DEVICE auto ask(BackwardWork const& work, uint32_t stage_index) const {
    if constexpr (Traits::kAsksEarly) {
      Asked asked;
      // Opaque, so that the compiler leaves the loads and the comparisons here.
      asked.masked = opaque(int(work.tiles.masked(shared.stages[stage_index].m_block))) != 0;
      auto const sLse = lse(stage_index);  // (KEYS, QUERIES)
      CUTE_UNROLL
      for (int query = 0; query < decltype(cute::size<1>(sLse))::value; ++query) {
        asked.lse_of_query[query] = opaque(sLse(0, query));
      }
      return asked;
    } else {
      return NothingAsked{};
    }
  }

  // The LSE for begin() and finish(), from registers where ask() has loaded it.
  //   asked  what ask() has returned
  template <class OfStep>
  CUTE_DEVICE auto lse(uint32_t stage_index, OfStep const& asked) const {
    if constexpr (Traits::kAsksEarly) {
      return asked;
    } else {
      return lse(stage_index);
    }
  }

  // Starts to load the numbers of a bias of keys, for begin().
  CUTE_DEVICE KeyBiasNumbers load_key_bias(BackwardWork const& work, uint32_t stage_index) const {
    if constexpr (Traits::kKeyBias) {
      return KeyBiasOfStep::load<Element>(arguments.params, shared.stages[stage_index].data,
                                          work.tile.n_block * kTileN, opaque(thread));
    } else {
      return {};
    }
  }

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
  // Before dP is there: makes scores P, or what a map leaves of them (backward_scores.h), or
  // factors. Returns the terms in exponents, for finish().
  //   kFewRegisters  whether the LSE is not loaded far ahead
  //   tSrS           (MMA, MMA_N, MMA_M)
  //   sLse           lse() of the step
  //   key_bias       load_key_bias() of the step
  //   tdVrP          (MMA, MMA_N, MMA_M / 16)  becomes P in 16 bits where it is rounded here
  template <bool kFewRegisters, class Lse>
  CUTE_DEVICE auto begin(BackwardWork const& work, uint32_t stage_index, FragmentS& tSrS, Lse sLse,
                         KeyBiasNumbers const& key_bias, Operand& tdVrP) const {
    using namespace cute;
    static_assert(!kFewRegisters || Scores::kMasksFirst,
                  "zero_after() needs P, not modified scores");
    auto const& stage = shared.stages[stage_index];
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));  // (KEYS, QUERIES)
    if constexpr (Scores::kModifiesCopies) {
      // take_copies() does it.
    } else if constexpr (Traits::kKeyBias) {
      key_bias.add(bias_per_unit(arguments.params, work.sequence, arguments.params.scale), rS);
    } else if constexpr (Traits::kFloatBias) {
      await_bias(stage_index);
      CUTE_UNROLL
      for (int k = 0; k < kBlocks; ++k) {
        add_float_bias(k, bias_per_unit(arguments.params, work.sequence, arguments.params.scale),
                       make_tensor(tSrS.data() + kBiasNumbers * k, Int<kBiasNumbers>{}));
      }
      release_bias();
    } else if constexpr (Traits::kBiasTiles) {
      if constexpr (Traits::kBiasOfWarpgroups) {
        await_bias(stage_index);
      }
      add_bias_tile<BiasOfTranspose, kTileM>(  // a box of it is a warpgroup's
          arguments.bias, shared.bias_tile(Traits::kBiasOfWarpgroups ? 0 : stage_index), 0,
          opaque(thread), bias_per_unit(arguments.params, work.sequence, arguments.params.scale),
          tSrS);
      if constexpr (Traits::kBiasOfWarpgroups) {
        release_bias();
      }
    } else if constexpr (Scores::kTermsInScores) {
      placed().add_terms(work, stage, tSrS);
    }
    if constexpr (Traits::kAsksEarly) {
      placed().mask(sLse.masked, work, stage.m_block, tSrS);
    } else if constexpr (Scores::kMasksFirst) {
      placed().mask(work, stage.m_block, tSrS);
    }
    auto const terms = placed().terms(work, stage, tSrS);
    if constexpr (Scores::Modifiers::kHasMap) {
      constexpr int kQueries = decltype(size<1>(rS))::value;
      scores.template map_all<Scores::kModifiesCopies ? 4 : kQueries>(rS);
    } else {
      CUTE_UNROLL
      for (int query = 0; query < size<1>(rS); ++query) {
        if constexpr (kFewRegisters) {
          if (query > 0 && query % kLseAhead == 0) {
            sLse.data() = sLse.data() + zero_after(rS(0, query - kLseAhead));
          }
        }
        scores.begin(rS(_, query), true, sLse(0, query), terms.of_query(query));
      }
    }
    if constexpr (!Scores::kMasksFirst && !Scores::kModifiesCopies) {
      placed().mask(work, stage.m_block, tSrS);
    }
    if constexpr (Scores::kModifiesCopies) {
      take_copies(work, stage_index, 0, kBlocksFirst, tSrS, tdVrP);
    } else if constexpr (kTakesFactors) {
      CUTE_UNROLL
      for (int k = 0; k < kBlocks; ++k) {
        take_factors(k, terms, sLse, tSrS, tdVrP);
      }
    }
    return terms;
  }

  // When dP is there, with delta or without it (kStartsWithDelta): makes it dS, and what begin()
  // left P, or what is kept of it.
  //   tSrS, tdPrdP  (MMA, MMA_N, MMA_M)
  //   tdVrP         (MMA, MMA_N, MMA_M / 16)  becomes P in 16 bits, if begin() has not made it
  template <class Terms, class Lse>
  CUTE_DEVICE void finish(BackwardWork const& work, uint32_t stage_index, Terms const& terms,
                          Lse const& sLse, FragmentS& tSrS, FragmentS& tdPrdP,
                          Operand& tdVrP) const {
    using namespace cute;
    if constexpr (Scores::kModifiesCopies) {
      CUTE_UNROLL
      for (int k = 0; k < kBlocks; ++k) {  // block after block: its factors need registers no more
        if (k >= kBlocksFirst) {
          take_copies(work, stage_index, k, k + 1, tSrS, tdVrP);
        }
        finish_factors(stage_index, k, tSrS, tdPrdP);
      }
    } else if constexpr (kDrops) {
      QueryPacking const packing = unpacked_queries();
      auto const& stage = shared.stages[stage_index];
      auto const tile = placed().tile(work, stage.m_block, tSrS, packing);
      KeepTest const test(uint32_t(arguments.params.dropout.drop_count));
      Tensor tdPsDelta =  // (MMA, MMA_N, MMA_M)
          row_numbers<Traits>(thread, shared.delta[stage_index]);
      CUTE_UNROLL
      for (int k = 0; k < kBlocks; ++k) {  // block after block: fewer words in registers
        auto const kept = kept_block_of_transpose(tile, test, stage.words, 0, k);
        CUTE_UNROLL
        for (int i = 8 * k; i < 8 * k + 8; ++i) {
          int const query = 4 * k + i % 8 / 4 * 2 + i % 2, key = i / 2 % 2;
          float const factor =  // makes the score P
              scores.factor(tSrS(i), sLse(0, query), terms.of_query(query), key);
          bool const keeps = kept.keeps(i % 8);
          tSrS(i) = keeps ? tSrS(i) : 0.f;
          tdPrdP(i) = fmaf(keeps ? factor : 0.f, tdPrdP(i), factor * tdPsDelta(i));
        }
        convert_block(tSrS, k, tdVrP);
      }
    } else if constexpr (kTakesFactors) {
      add_delta(stage_index, tdPrdP);
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) {
        tdPrdP(i) *= tSrS(i);
      }
    } else {
      add_delta(stage_index, tdPrdP);
      Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));  // (KEYS, QUERIES)
      auto const by_query = rows_and_columns(tdPrdP.layout());
      Tensor rdP = make_tensor(tdPrdP.data(), by_query);  // (KEYS, QUERIES)
      CUTE_UNROLL
      for (int query = 0; query < size<1>(rS); ++query) {
        scores.finish(rS(_, query), rdP(_, query), sLse(0, query), terms.of_query(query));
      }
      convert_into(tSrS, tdVrP);
    }
  }

  // The same for the queries of a chunk, whose dP has no delta.
  //   tSrS    (MMA, MMA_N, MMA_M)       P of the whole step
  //   tdPrdP  (MMA, MMA_N, MMA_M)       of the chunk: dP, becomes dS
  //   tdVrP   (MMA, MMA_N, MMA_M / 16)  its blocks of the chunk become P in 16 bits
  CUTE_DEVICE void finish_chunk(uint32_t stage_index, int chunk, FragmentS& tSrS, FragmentP& tdPrdP,
                                Operand& tdVrP) const {
    using namespace cute;
    constexpr int kChunkM = Traits::kChunkM, kNumbers = decltype(size(tdPrdP))::value;
    Tensor sDelta = make_tensor(  // (N, CHUNK_M)
        make_smem_ptr(shared.delta[stage_index] + chunk * kChunkM),
        Layout<Shape<Int<kTileN>, Int<kChunkM>>, Stride<_0, _1>>{});
    Tensor tdPsDelta =  // (MMA, MMA_N, MMA_M)
        typename Traits::MmaP{}.get_slice(opaque(thread)).partition_C(sDelta);
    CUTE_UNROLL
    for (int i = 0; i < kNumbers; ++i) {
      tdPrdP(i) = tSrS(chunk * kNumbers + i) * (tdPrdP(i) + tdPsDelta(i));
    }
    CUTE_UNROLL
    for (int k = chunk * kNumbers / 8; k < (chunk + 1) * kNumbers / 8; ++k) {
      convert_block(tSrS, k, tdVrP);
    }
  }

 private:
  // Adds delta to dP, if its accumulators have not begun with it.
  CUTE_DEVICE void add_delta(uint32_t stage_index, FragmentS& tdPrdP) const {
    if constexpr (!kStartsWithDelta) {
      cute::Tensor tdPsDelta =  // (MMA, MMA_N, MMA_M)
          row_numbers<Traits>(thread, shared.delta[stage_index]);
      CUTE_UNROLL
      for (int i = 0; i < decltype(cute::size(tdPrdP))::value; ++i) {
        tdPrdP(i) += tdPsDelta(i);
      }
    }
  }

  CUTE_DEVICE PlacedScores<Traits, Scores> placed() const { return {arguments.params, thread}; }

  // Computed anew at each use: no register keeps it, nor an address that follows from it.
  CUTE_DEVICE int bias_warpgroup() const { return opaque(thread) / kWarpgroupThreads; }
  // The tile of the bias of this warpgroup, of which each step has the next: with two stages the
  // number of a step's stage is the phase of its tile, too.
  CUTE_DEVICE void await_bias(uint32_t stage_index) const {
    Barrier::wait(&shared.bias_barriers.full[bias_warpgroup()], stage_index);
  }
  template <class Eight>
  CUTE_DEVICE void add_float_bias(int k, float per_unit, Eight&& scores) const {
    auto const* const tile = shared.bias_tile(bias_warpgroup());
    add_float_bias_step<kTileM>(arguments.bias, reinterpret_cast<float const*>(tile),
                                opaque(thread) % kWarpgroupThreads, k, per_unit, scores);
  }
  CUTE_DEVICE void release_bias() const {
    end_reads();
    if (thread % 32 == 0) {
      Barrier::arrive(&shared.bias_barriers.empty[bias_warpgroup()]);
    }
  }

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
