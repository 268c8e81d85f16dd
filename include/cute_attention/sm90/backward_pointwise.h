// sm90/backward_pointwise.h: the pointwise work of a step of the backward kernel: P and dS of this
// thread's scores, from the products S and dP.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm90/backward_factors.h"

namespace cute_attention::sm90 {

// A base class of the one that computes products. With a member in its place the instructions are
// the same, and those of rows with every modifier come in another order.
template <class Row>
struct BackwardPointwise : BackwardFactors<Row> {
  using Base = BackwardFactors<Row>;
  using Base::arguments, Base::kBlocks, Base::kBlocksFirst, Base::kDrops, Base::kScoreMods,
      Base::kStartsWithDelta, Base::kTakesFactors, Base::kTileM, Base::kTileN, Base::scores,
      Base::shared, Base::thread;
  using typename Base::Element;
  using typename Base::FragmentS;
  using typename Base::Operand;
  using typename Base::Scores;
  using typename Base::Traits;
  using FragmentP = decltype(cute::partition_fragment_C(  // of a chunk of the queries
      typename Traits::MmaP{}, cute::Shape<cute::Int<kTileN>, cute::Int<Traits::kChunkM>>{}));
  using KeyBiasNumbers = std::conditional_t<Traits::kKeyBias, KeyBiasOfStep, NoKeyBias>;
  // For how many columns of S a thread may load the LSE ahead, where it has a limit. Without one
  // ptxas loads all of it first, and spills where a kernel leaves few registers.
  static constexpr int kLseAhead = 16;

  using Base::Base;

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
  using Base::drop_block, Base::finish_factors, Base::placed, Base::take_copies, Base::take_factors;

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
};

}  // namespace cute_attention::sm90
