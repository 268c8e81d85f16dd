// sm90/grad_kv_compute.h: what the two consumer warpgroups of the kernel for dK and dV do. In step
// m, from left to right:
//
//   warpgroup of dV   products   S(m)          | dV(m)   S(m+1)
//                     pointwise       P(m)     |
//   warpgroup of dK   products   dP(m)         | dK(m)   dP(m+1)
//                     pointwise        dS(m)   |
//
// The one writes P, in floats, to shared memory; the other multiplies dP with it. While one of them
// computes pointwise, the tensor cores work for the other.
#pragma once

#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/sm90/bias_words.h"
#include "cute_attention/sm90/grad_kv_consumer.h"
#include "cute_attention/sm90/placed_scores.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

// The warpgroup that computes dV.
template <class Row>
struct GradVCompute : GradKvConsumer<Row, GradVCompute<Row>> {
  using Base = GradKvConsumer<Row, GradVCompute<Row>>;
  using Traits = typename Base::Traits;
  using Element = typename Base::Element;
  using FragmentS = typename Base::FragmentS;
  using Base::arguments;
  using Base::kDrops;
  using Base::shared;
  using Base::steps;
  using Base::thread;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Scores = BackwardScores<kScoreMods>;
  // With the terms that stand beside words of the bias.
  using OtherScores = BackwardScores<kScoreMods, score_mods::Bias>;
  using FragmentV = typename Base::template Fragment<typename Traits::MmaV, Traits::kHeadDimV>;

  using Bias = BiasWords<WordsOfTranspose, cute::size(FragmentS{}) / 2, Traits::kTileN>;

  Scores const scores;
  FragmentV tdVrdV;  // (MMA, MMA_N, MMA_DV)

  CUTE_DEVICE GradVCompute(BackwardArguments const& arguments,
                           typename Traits::SharedMemory& shared, int thread)
      : Base{arguments, shared, thread}, scores(arguments.params) {}

  CUTE_DEVICE void clear() { cute::clear(tdVrdV); }

  CUTE_DEVICE void begin_keys(uint32_t parity) { Barrier::wait(&shared.key_full[0], parity); }

  // One step. dV of the step before is under way.
  CUTE_DEVICE void step(BackwardWork const& work) {
    using namespace cute;
    FragmentS tSrS;                // (MMA, MMA_N, MMA_M): S^T, then P^T
    typename Base::Operand tdVrP;  // (MMA, MMA_N, MMA_M / 16)
    auto const ring = buffer_of<Traits::kStages>(steps);
    Barrier::wait(&shared.query_full[ring.stage], ring.parity);
    Base::template start_scores<typename Traits::MmaS, typename Traits::SmemLayoutK,
                                typename Traits::SmemLayoutQ>(shared.k, shared.q, ring.stage, tSrS);
    Bias bias;
    if constexpr (Scores::kTermsInScores) {
      auto const& stage = shared.stages[ring.stage];
      bias.load(arguments.params, arguments.bias_is_aligned, stage.data,
                stage.m_block * Traits::kTileM, work.tile.n_block * Traits::kTileN, opaque(thread));
    }
    warpgroup_wait<1>();  // dV of the step before
    if (steps > 0) {
      arrive_by_warp(shared.grad_o_empty[buffer_of<Traits::kStages>(steps - 1).stage]);
    }
    warpgroup_wait<0>();  // S
    warpgroup_fence_operand(tSrS);
    Tensor tSsLse = row_numbers<Traits>(thread, shared.lse[ring.stage]);  // (MMA, MMA_N, MMA_M)
    Tensor sLse = make_tensor(tSsLse.data(), rows_and_columns(tSsLse.layout()));  // (KEYS, QUERIES)
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));        // (KEYS, QUERIES)
    if constexpr (Scores::kTermsInScores && !Scores::kModifiesCopies) {
      if (bias.are_there) {
        bias.template add<Element>(
            bias_per_unit(arguments.params, work.sequence, arguments.params.scale), tSrS);
      } else {
        placed().add_terms(work, shared.stages[ring.stage], tSrS);
      }
    }
    if constexpr (Scores::kMasksFirst) {
      placed().mask(work, shared.stages[ring.stage].m_block, tSrS);
    }
    auto const terms = placed().terms(work, shared.stages[ring.stage], tSrS);
    if constexpr (Scores::Modifiers::kHasMap) {
      scores.template map_all<decltype(size<1>(rS))::value>(rS);
    } else {
      CUTE_UNROLL
      for (int query = 0; query < size<1>(rS); ++query) {
        scores.begin(rS(_, query), true, sLse(0, query), terms.of_query(query));
      }
    }
    if constexpr (!Scores::kMasksFirst && !Scores::kModifiesCopies) {
      placed().mask(work, shared.stages[ring.stage].m_block, tSrS);
    }
    auto const take_factors = [&](FragmentS& factors) {
      if constexpr (Scores::kModifiesCopies) {
        take_copies(work, ring.stage, bias, tSrS, factors);
      } else {
        Tensor rF =  // (KEYS, QUERIES)
            make_tensor(factors.data(), rows_and_columns(factors.layout()));
        CUTE_UNROLL
        for (int query = 0; query < size<1>(rS); ++query) {
          CUTE_UNROLL
          for (int key = 0; key < size<0>(rS); ++key) {
            rF(key, query) =
                scores.factor(rS(key, query), sLse(0, query), terms.of_query(query), key);
          }
        }
      }
    };
    if constexpr (kDrops) {
      auto const kept = placed().kept(work, shared.stages[ring.stage], tSrS);
      // A factor is P times a derivative, neither of them negative: its sign says that its score is
      // dropped.
      write_factors([&](FragmentS& factors) {
        take_factors(factors);
        CUTE_UNROLL
        for (int i = 0; i < size(factors); ++i) {
          factors(i) = kept.keeps(i) ? factors(i) : -factors(i);
        }
      });
      release_queries(ring.stage);
      Barrier::wait(&shared.grad_o_full[ring.stage], ring.parity);
      convert_into(tSrS, tdVrP);
      kept.drop(tdVrP);
    } else {
      write_factors(take_factors);
      release_queries(ring.stage);
      Barrier::wait(&shared.grad_o_full[ring.stage], ring.parity);
      convert_into(tSrS, tdVrP);
    }
    Base::template start_gradient<typename Traits::MmaV, typename Traits::SmemLayoutGradOt>(
        tdVrP, shared.grad_o, ring.stage, tdVrdV);
  }

  CUTE_DEVICE void end_keys() {
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tdVrdV);
    arrive_by_warp(shared.key_empty[0]);
  }

  CUTE_DEVICE void store(BackwardWork const& work) {
    BackwardParams const& params = arguments.params;
    if constexpr (kDrops) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tdVrdV); ++i) {
        tdVrdV(i) *= grad_v_scale(params);
      }
    }
    store_rows(tdVrdV, this->first_key(params.grad_v, params.grad_v_stride, work),
               params.grad_v_stride.row, Base::keys_left(work), params.head_dim_v, thread);
  }
  CUTE_DEVICE void store_part(BackwardWork const& work) {
    Base::Sums::template store_grad_v<typename Traits::MmaV>(arguments.params, work.sequence,
                                                             work.tile, thread, tdVrdV);
  }

 private:
  CUTE_DEVICE PlacedScores<Traits, Scores> placed() const { return {arguments.params, thread}; }

  // This warp has read the LSE, and what stands beside it.
  CUTE_DEVICE void release_queries(uint32_t stage) {
    __syncwarp();
    arrive_by_warp(shared.query_empty[stage]);
  }

  // With kModifiesCopies (backward_scores.h): makes mapped scores probabilities, of one block of 16
  // queries after the other.
  //   tSrS, factors  (MMA, MMA_N, MMA_M)  the latter becomes what dP + delta is multiplied with
  CUTE_DEVICE void take_copies(BackwardWork const& work, uint32_t stage_index, Bias& bias,
                               FragmentS& tSrS, FragmentS& factors) const {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    auto const& stage = shared.stages[stage_index];
    QueryPacking const packing = unpacked_queries();
    auto const tile = placed().tile(work, stage.m_block, tSrS, packing);
    Tensor sLse = row_numbers<Traits>(thread, shared.lse[stage_index]);  // (MMA, MMA_N, MMA_M)
    float const unit = Scores::Modifiers::exponent_scale(params);
    CUTE_UNROLL
    for (int k = 0; k < size(tSrS) / 8; ++k) {
      Tensor rZ = make_tensor<float>(Int<8>{});  // (8), in the order of the accumulator
      auto const copies = copies_of_scores<4, 2>(tile, 4 * k, 0, rZ);
      if (bias.are_there) {
        bias.template add<Element>(bias_per_unit(params, work.sequence, unit), rZ, 4 * k);
        OtherScores::template add_terms<Element>(params, stage, copies);
      } else {
        Scores::template add_terms<Element>(params, stage, copies);
      }
      placed().mask_copies(work, stage.m_block, copies);
      CUTE_UNROLL
      for (int i = 8 * k; i < 8 * k + 8; ++i) {
        factors(i) = scores.factor(tSrS(i), rZ(i % 8), sLse(i));
      }
    }
  }

  // Hands what dP + delta is multiplied with to the other warpgroup.
  //   take(factors)  computes them (MMA, MMA_N, MMA_M), and makes scores probabilities
  template <class Take>
  CUTE_DEVICE void write_factors(Take const& take) {
    auto const ring = buffer_of<Traits::kStagesFactor>(steps);
    FragmentS tSrF;  // (MMA, MMA_N, MMA_M)
    take(tSrF);
    Barrier::wait(&shared.factor_empty[ring.stage], ring.parity ^ 1);
    CUTE_UNROLL
    for (int v = 0; v < Base::kFactorVectors; ++v) {
      this->factors(ring.stage, v) =
          make_float4(tSrF(4 * v), tSrF(4 * v + 1), tSrF(4 * v + 2), tSrF(4 * v + 3));
    }
    __syncwarp();
    arrive_by_warp(shared.factor_full[ring.stage]);
  }
};

// The warpgroup that computes dK.
template <class Row>
struct GradKCompute : GradKvConsumer<Row, GradKCompute<Row>> {
  using Base = GradKvConsumer<Row, GradKCompute<Row>>;
  using Traits = typename Base::Traits;
  using Element = typename Base::Element;
  using FragmentS = typename Base::FragmentS;
  using Base::arguments;
  using Base::kDrops;
  using Base::shared;
  using Base::steps;
  using Base::thread;
  using FragmentK = typename Base::template Fragment<typename Traits::MmaK, Traits::kHeadDim>;

  FragmentK tdKrdK;  // (MMA, MMA_N, MMA_D)

  CUTE_DEVICE GradKCompute(BackwardArguments const& arguments,
                           typename Traits::SharedMemory& shared, int thread)
      : Base{arguments, shared, thread} {}

  CUTE_DEVICE void clear() { cute::clear(tdKrdK); }

  CUTE_DEVICE void begin_keys(uint32_t parity) { Barrier::wait(&shared.value_full, parity); }

  // One step. dK of the step before is under way.
  CUTE_DEVICE void step(BackwardWork const&) {
    using namespace cute;
    FragmentS tdPrdP;               // (MMA, MMA_N, MMA_M): dP^T, then dS^T
    typename Base::Operand tdKrdS;  // (MMA, MMA_N, MMA_M / 16)
    auto const ring = buffer_of<Traits::kStages>(steps);
    Barrier::wait(&shared.grad_o_full[ring.stage], ring.parity);
    Base::template start_scores<typename Traits::MmaP, typename Traits::SmemLayoutV,
                                typename Traits::SmemLayoutGradO>(shared.v, shared.grad_o,
                                                                  ring.stage, tdPrdP);
    warpgroup_wait<1>();  // dK of the step before
    if (steps > 0) {
      arrive_by_warp(shared.query_empty[buffer_of<Traits::kStages>(steps - 1).stage]);
    }
    warpgroup_wait<0>();  // dP
    warpgroup_fence_operand(tdPrdP);
    if constexpr (kDrops) {
      clear_dropped(tdPrdP);
    }
    Tensor tdPsDelta =  // (MMA, MMA_N, MMA_M)
        row_numbers<Traits>(thread, shared.delta[ring.stage]);
    CUTE_UNROLL
    for (int i = 0; i < size(tdPrdP); ++i) {
      tdPrdP(i) += tdPsDelta(i);
    }
    __syncwarp();  // all lanes have read delta
    arrive_by_warp(shared.grad_o_empty[ring.stage]);
    multiply_by_factors(tdPrdP);
    Barrier::wait(&shared.query_full[ring.stage], ring.parity);
    convert_into(tdPrdP, tdKrdS);
    Base::template start_gradient<typename Traits::MmaK, typename Traits::SmemLayoutQt>(
        tdKrdS, shared.q, ring.stage, tdKrdK);
  }

  CUTE_DEVICE void end_keys() {
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tdKrdK);
    arrive_by_warp(shared.value_empty);
  }

  // dK is the gradient of unscaled keys.
  CUTE_DEVICE void store(BackwardWork const& work) {
    BackwardParams const& params = arguments.params;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(tdKrdK); ++i) {
      tdKrdK(i) *= grad_qk_scale(params);
    }
    store_rows(tdKrdK, this->first_key(params.grad_k, params.grad_k_stride, work),
               params.grad_k_stride.row, Base::keys_left(work), params.head_dim, thread);
  }
  CUTE_DEVICE void store_part(BackwardWork const& work) {
    Base::Sums::template store_grad_k<typename Traits::MmaK>(arguments.params, work.sequence,
                                                             work.tile, thread, tdKrdK);
  }

 private:
  // Clears dP of dropped scores, whose factors have a sign.
  CUTE_DEVICE void clear_dropped(FragmentS& tdPrdP) {
    auto const ring = buffer_of<Traits::kStagesFactor>(steps);
    Barrier::wait(&shared.factor_full[ring.stage], ring.parity);
    CUTE_UNROLL
    for (int v = 0; v < Base::kFactorVectors; ++v) {
      float4 const factor = this->factors(ring.stage, v);
      tdPrdP(4 * v) = signbit(factor.x) ? 0.f : tdPrdP(4 * v);
      tdPrdP(4 * v + 1) = signbit(factor.y) ? 0.f : tdPrdP(4 * v + 1);
      tdPrdP(4 * v + 2) = signbit(factor.z) ? 0.f : tdPrdP(4 * v + 2);
      tdPrdP(4 * v + 3) = signbit(factor.w) ? 0.f : tdPrdP(4 * v + 3);
    }
  }

  // A factor without the sign that says whether its score is dropped.
  CUTE_DEVICE static float size_of(float factor) {
    if constexpr (kDrops) {
      return fabsf(factor);
    } else {
      return factor;
    }
  }

  // Makes dP + delta dS.
  CUTE_DEVICE void multiply_by_factors(FragmentS& tdPrdP) {
    auto const ring = buffer_of<Traits::kStagesFactor>(steps);
    Barrier::wait(&shared.factor_full[ring.stage], ring.parity);
    CUTE_UNROLL
    for (int v = 0; v < Base::kFactorVectors; ++v) {
      float4 const factor = this->factors(ring.stage, v);
      tdPrdP(4 * v) *= size_of(factor.x);
      tdPrdP(4 * v + 1) *= size_of(factor.y);
      tdPrdP(4 * v + 2) *= size_of(factor.z);
      tdPrdP(4 * v + 3) *= size_of(factor.w);
    }
    __syncwarp();
    arrive_by_warp(shared.factor_empty[ring.stage]);
  }
};

}  // namespace cute_attention::sm90
