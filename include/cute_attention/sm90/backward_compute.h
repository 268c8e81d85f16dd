// sm90/backward_compute.h: what a consumer warpgroup does: dK and dV of its 64 keys, and its part
// of dQ of each step.
//
// A part of dQ needs dS of all warpgroups. If dQ of a step were computed in the same step, the
// warpgroups would wait for each other, would then do their pointwise work at the same time, and
// the tensor cores would stand still meanwhile. So a warpgroup computes dQ one step later, when the
// others have long written their dS. In step m it computes, from left to right,
//
//   products of the tensor cores   S(m)   dP(m)           dV(m)                  dQ(m-1)  dK(m)
//   pointwise work                        P(m)    dS(m)   dS(m) to shared memory          dQ(m-1)
//
// and S(m+1) is started while dK(m) runs. Where there are registers for S, dP and dQ together
// (kGradQFirst), the tensor cores also compute dQ while dS is computed:
//
//   products of the tensor cores   S(m)   dP(m)   dQ(m-1)   dV(m)   dK(m)
//   pointwise work                        P(m)    dS(m)             dQ(m-1), dS(m) to shared memory
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/global_sum.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/sm90/backward_store.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/gemm.h"

namespace cute_attention::sm90 {

//   kWritesGradQ  whether dQ of a step is written to its place. Else another warp adds it to sums.
template <class Row, bool kWritesGradQ>
struct BackwardCompute {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Scores =
      BackwardScores<kScoreMods, Traits::kBiasTiles ? score_mods::Bias : score_mods::None>;
  using Sums = KeyGradientSums<Traits, Traits::kFinishThreads>;
  using QueryRing = Ring<Traits::kStages>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  // To write dQ takes registers that are not there beside it, S and dP.
  static constexpr bool kGradQFirst = Traits::kGradQFirst && !kWritesGradQ;
  static constexpr bool kDrops = has_dropout(kScoreMods);
  // For how many columns of S a thread may load the LSE ahead. Without a limit ptxas loads all of
  // it first, and spills where kGradQFirst leaves few registers.
  static constexpr int kLseAhead = 16;
  static_assert(!kGradQFirst || Scores::kMasksFirst, "zero_after() needs P, not modified scores");

  template <class Mma, int kRows, int kCols>
  using Fragment = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  using FragmentS = Fragment<typename Traits::MmaS, kTileN, kTileM>;
  using FragmentK = Fragment<typename Traits::MmaK, kTileN, kHeadDim>;
  using FragmentV = Fragment<typename Traits::MmaV, kTileN, kHeadDimV>;
  using FragmentQ = Fragment<typename Traits::MmaQ, kWarpgroupM, Traits::kColsQ>;
  using Operand = decltype(cute::make_tensor<Element>(as_a_operand(FragmentS{}.layout())));

  BackwardArguments const& arguments;
  SharedMemory& shared;
  int const warpgroup;  // of the consumers
  int const thread;     // of the consumers
  Scores const scores;

  FragmentK tdKrdK;  // (MMA, MMA_N, MMA_D)
  FragmentV tdVrdV;  // (MMA, MMA_N, MMA_DV)
  // How many steps, and how many dS, there were before this step in all blocks of this CTA. Before
  // the first step of each block comes a dS that nobody writes. So their difference is the number
  // of blocks that had steps.
  int32_t steps_before = 0;
  int32_t grads_before = 0;

  CUTE_DEVICE BackwardCompute(BackwardArguments const& arguments, SharedMemory& shared,
                              int warpgroup, int thread)
      : arguments(arguments),
        shared(shared),
        warpgroup(warpgroup),
        thread(thread),
        scores(arguments.params) {}

  CUTE_DEVICE void run() {
    for (int32_t number = 0;; ++number) {
      auto const slot = buffer_of<kWorkSlots>(number);
      Barrier::wait(&shared.work_full[slot.stage], slot.parity);
      BackwardWork const& work = shared.works[slot.stage];
      if (work.is_end()) {
        break;
      }
      compute_keys(work);
      if (arguments.schedule.parts == 1) {
        store_key_gradients<Traits>(arguments.params, work, warpgroup, thread % kWarpgroupThreads,
                                    tdKrdK, tdVrdV);
      } else if (work.steps.count > 0) {
        using MmaK = typename Traits::MmaK;
        using MmaV = typename Traits::MmaV;
        Sums::template store<MmaK, MmaV>(arguments.params, work.sequence, work.tile, thread, tdKrdK,
                                         tdVrdV);
      }
      __syncwarp();  // all lanes have read the work
      arrive(shared.work_empty[buffer_of<kWorkSlots>(number).stage]);
    }
  }

 private:
  // Computes dK and dV of a part of a block of keys, and what it adds to dQ.
  CUTE_DEVICE void compute_keys(BackwardWork const& work) {
    cute::clear(tdKrdK);
    cute::clear(tdVrdV);
    int const count = work.steps.count;
    if (count == 0) {
      return;
    }
    uint32_t const parity = uint32_t(grads_before - steps_before) % 2;
    Barrier::wait(&shared.key_full, parity);
    Barrier::wait(&shared.value_full, parity);
    // The first step also computes dQ of a step before it, which does not exist: from a dS that
    // nobody has written. The warp that adds dQ to its sums leaves this one out.
    arrive(shared.grad_s_full[grad_s_of(grads_before).stage]);
    int remaining = count;
    do {
      compute_step(work, remaining == count);
    } while (--remaining > 0);
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D): dQ of the last step
    await_grad_s();
    start_grad_q(tdQrdQ);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tdKrdK);
    cute::warpgroup_fence_operand(tdVrdV);
    arrive(shared.key_empty);
    arrive(shared.value_empty);
    hand_over_grad_q(work, false, tdQrdQ);
    ++grads_before;
  }

  CUTE_DEVICE static QueryRing queries_of(int32_t number) {
    return buffer_of<Traits::kStages>(number);
  }
  CUTE_DEVICE static Ring<Traits::kStagesS> grad_s_of(int32_t number) {
    return buffer_of<Traits::kStagesS>(number);
  }

  // This warp's MMAs have read Q and dO of the step before, and its lanes the LSE and delta.
  CUTE_DEVICE void release_queries() {
    __syncwarp();
    uint32_t const stage = queries_of(steps_before - 1).stage;
    arrive(shared.query_empty[stage]);
    arrive(shared.grad_o_empty[stage]);
  }

  // Tells another warp that this warp's MMAs have read a buffer, or that it has filled one.
  CUTE_DEVICE void arrive(uint64_t& barrier) {
    if (thread % 32 == 0) {
      Barrier::arrive(&barrier);
    }
  }

  // Starts S^T = K Q^T with the Q of `ring`.
  CUTE_DEVICE void start_scores(FragmentS& tSrS, QueryRing const& ring) {
    using namespace cute;
    typename Traits::MmaS mma;
    Tensor sK = in_shared<typename Traits::SmemLayoutK>(shared.k);  // (N, D, 1)
    Tensor sQ = in_shared<typename Traits::SmemLayoutQ>(shared.q);  // (M, D, STAGE)
    auto const thread_mma = mma.get_slice(warpgroup * kWarpgroupThreads);
    Tensor tSrK = thread_mma.partition_fragment_A(sK);  // (MMA, MMA_N, MMA_D, 1)
    Tensor tSrQ = thread_mma.partition_fragment_B(sQ);  // (MMA, MMA_M, MMA_D, STAGE)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tSrK(_, _, _, 0), tSrQ(_, _, _, ring.stage), tSrS);
  }

  // Starts dP^T + delta = V dO^T + delta, in accumulators that contain delta.
  CUTE_DEVICE void start_grad_p(FragmentS& tdPrdP, QueryRing const& ring) {
    using namespace cute;
    Barrier::wait(&shared.grad_o_full[ring.stage], ring.parity);
    copy(row_numbers<Traits>(thread, shared.delta[ring.stage]), tdPrdP);
    typename Traits::MmaS mma;
    Tensor sV = in_shared<typename Traits::SmemLayoutV>(shared.v);            // (N, DV, 1)
    Tensor sdO = in_shared<typename Traits::SmemLayoutGradO>(shared.grad_o);  // (M, DV, STAGE)
    auto const thread_mma = mma.get_slice(warpgroup * kWarpgroupThreads);
    Tensor tdPrV = thread_mma.partition_fragment_A(sV);    // (MMA, MMA_N, MMA_DV, 1)
    Tensor tdPrdO = thread_mma.partition_fragment_B(sdO);  // (MMA, MMA_M, MMA_DV, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdPrV(_, _, _, 0), tdPrdO(_, _, _, ring.stage), tdPrdP);
  }

  // Starts dV += P^T dO.
  CUTE_DEVICE void start_grad_v(Operand const& tdVrP, QueryRing const& ring) {
    using namespace cute;
    typename Traits::MmaV mma;
    Tensor sdOt = in_shared<typename Traits::SmemLayoutGradOt>(shared.grad_o);  // (DV, M, STAGE)
    Tensor tdVrdO = mma.get_slice(0).partition_fragment_B(sdOt);  // (MMA, MMA_DV, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdVrP, tdVrdO(_, _, _, ring.stage), tdVrdV);
  }

  // Starts dK += dS^T Q.
  CUTE_DEVICE void start_grad_k(Operand const& tdKrdS, QueryRing const& ring) {
    using namespace cute;
    typename Traits::MmaK mma;
    Tensor sQt = in_shared<typename Traits::SmemLayoutQt>(shared.q);  // (D, M, STAGE)
    Tensor tdKrQ = mma.get_slice(0).partition_fragment_B(sQt);        // (MMA, MMA_D, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdKrdS, tdKrQ(_, _, _, ring.stage), tdKrdK);
  }

  // Waits until dS of the step before is there, of all keys.
  CUTE_DEVICE void await_grad_s() const {
    auto const ring_s = grad_s_of(grads_before);
    Barrier::wait(&shared.grad_s_full[ring_s.stage], ring_s.parity);
  }

  // Starts this warpgroup's part of dQ = dS K of the step before.
  CUTE_DEVICE void start_grad_q(FragmentQ& tdQrdQ) {
    using namespace cute;
    auto const ring_s = grad_s_of(grads_before);
    typename Traits::MmaQ mma;
    Tensor sdS = in_shared<typename Traits::SmemLayoutS>(shared.grad_s);  // (M, N, STAGE)
    Tensor sKt = in_shared<typename Traits::SmemLayoutKt>(shared.k);      // (D, N, 1)
    Tensor sdS_part =                                                     // (64, N)
        local_tile(sdS, Shape<Int<kWarpgroupM>, Int<kTileN>>{},
                   make_coord(Traits::row_part_q(warpgroup), _0{}, ring_s.stage));
    Tensor sKt_part =  // (COLS_Q, N)
        local_tile(sKt, Shape<Int<Traits::kColsQ>, Int<kTileN>>{},
                   make_coord(Traits::col_part_q(warpgroup), _0{}, _0{}));
    auto const thread_mma = mma.get_slice(0);
    Tensor tdQrdS = thread_mma.partition_fragment_A(sdS_part);  // (MMA, MMA_M, MMA_N)
    Tensor tdQrK = thread_mma.partition_fragment_B(sKt_part);   // (MMA, MMA_D, MMA_N)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tdQrdS, tdQrK, tdQrdQ);
  }

  // One step. If it is not the block's first, dK of the step before is under way, and dQ of it is
  // computed.
  CUTE_DEVICE void compute_step(BackwardWork const& work, bool first) {
    using namespace cute;
    FragmentS tSrS;    // (MMA, MMA_N, MMA_M): S^T, then P^T
    FragmentS tdPrdP;  // (MMA, MMA_N, MMA_M): dP^T + delta, then dS^T
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D): dQ of the step before
    Operand tdVrP;     // (MMA, MMA_N, MMA_M / 16)
    Operand tdKrdS;    // (MMA, MMA_N, MMA_M / 16)
    auto const ring = queries_of(steps_before);
    Barrier::wait(&shared.query_full[ring.stage], ring.parity);
    start_scores(tSrS, ring);
    warpgroup_wait<1>();  // dK of the step before
    if (steps_before > 0) {
      release_queries();
    }
    start_grad_p(tdPrdP, ring);
    if constexpr (kGradQFirst) {
      await_grad_s();
    }
    warpgroup_wait<1>();  // S
    warpgroup_fence_operand(tSrS);
    Tensor tSsLse = row_numbers<Traits>(thread, shared.lse[ring.stage]);  // (MMA, MMA_N, MMA_M)
    Tensor sLse = make_tensor(tSsLse.data(), rows_and_columns(tSsLse.layout()));  // (KEYS, QUERIES)
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));        // (KEYS, QUERIES)
    Tensor rdP = make_tensor(tdPrdP.data(), rows_and_columns(tdPrdP.layout()));   // (KEYS, QUERIES)
    if constexpr (Scores::kModifiesCopies) {
      // finish_copies() does it.
    } else if constexpr (Traits::kBiasTiles) {
      add_bias_tile<BiasOfTranspose, kTileM>(
          arguments.bias, shared.bias_tile(ring.stage), 0, opaque(thread),
          bias_per_unit(arguments.params, work.sequence, arguments.params.scale), tSrS);
    } else if constexpr (Scores::kTermsInScores) {
      add_terms(work, shared.stages[ring.stage], tSrS);
    }
    if constexpr (Scores::kMasksFirst) {
      mask(work, shared.stages[ring.stage].m_block, tSrS);
    }
    bool const near = scores.all_near(rS);
    auto const terms = terms_of(work, shared.stages[ring.stage], tSrS);
    CUTE_UNROLL
    for (int query = 0; query < size<1>(rS); ++query) {
      if (kGradQFirst && query > 0 && query % kLseAhead == 0) {
        sLse.data() = sLse.data() + zero_after(rS(0, query - kLseAhead));
      }
      scores.begin(rS(_, query), near, sLse(0, query), terms.of_query(query));
    }
    if constexpr (!Scores::kMasksFirst && !Scores::kModifiesCopies) {
      mask(work, shared.stages[ring.stage].m_block, tSrS);
    }
    if constexpr (kGradQFirst) {
      warpgroup_fence_operand(tSrS);  // P is computed before dQ takes its registers
      start_grad_q(tdQrdQ);
      warpgroup_wait<1>();  // dP
    } else {
      warpgroup_wait<0>();  // dP
    }
    warpgroup_fence_operand(tdPrdP);
    // dV is not started before dP is there, so that P in 16 bits takes the registers of P.
    if constexpr (Scores::kModifiesCopies) {
      finish_copies(work, ring.stage, tSrS, tdPrdP, tdVrP);
    } else if constexpr (kDrops) {
      QueryPacking const packing = unpacked_queries();
      auto const& stage = shared.stages[ring.stage];
      auto const tile = score_tile(work, stage.m_block, tSrS, packing);
      KeepTest const test(uint32_t(arguments.params.dropout.drop_count));
      Tensor tdPsDelta =  // (MMA, MMA_N, MMA_M)
          row_numbers<Traits>(thread, shared.delta[ring.stage]);
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tdVrP); ++k) {  // block after block: fewer words in registers
        auto const kept = kept_block_of_transpose(tile, test, stage.words, 0, k);
        CUTE_UNROLL
        for (int i = 8 * k; i < 8 * k + 8; ++i) {
          tdPrdP(i) = kept.keeps(i % 8) ? tdPrdP(i) : tdPsDelta(i);
        }
        CUTE_UNROLL
        for (int query = 4 * k; query < 4 * k + 4; ++query) {
          scores.finish(rS(_, query), rdP(_, query), sLse(0, query), terms.of_query(query));
        }
        convert_block(tSrS, k, tdVrP);
        kept.drop(tdVrP(_, 0, k));
      }
    } else {
      CUTE_UNROLL
      for (int query = 0; query < size<1>(rS); ++query) {
        scores.finish(rS(_, query), rdP(_, query), sLse(0, query), terms.of_query(query));
      }
      convert_into(tSrS, tdVrP);
    }
    start_grad_v(tdVrP, ring);
    convert_into(tdPrdP, tdKrdS);
    if constexpr (kGradQFirst) {
      start_grad_k(tdKrdS, ring);
      warpgroup_wait<2>();  // dQ
      hand_over_grad_q(work, first, tdQrdQ);
      store_grad_s(tdKrdS);
    } else {
      store_grad_s(tdKrdS);
      await_grad_s();
      start_grad_q(tdQrdQ);
      start_grad_k(tdKrdS, ring);
      warpgroup_wait<1>();  // dV and dQ
      hand_over_grad_q(work, first, tdQrdQ);
    }
    // dV. dK stays under way: with both, ptxas would run out of registers and let no two products
    // overlap (C7512).
    warpgroup_wait<1>();
    ++steps_before;
    ++grads_before;
  }

  // Makes mapped scores P, and dP + delta dS, of one block of 16 queries after the other: of a
  // block registers hold a copy of the scores, with terms and masked (backward_scores.h).
  //   tSrS, tdPrdP  (MMA, MMA_N, MMA_M)
  //   tdVrP         (MMA, MMA_N, MMA_M / 16)  becomes P in 16 bits
  CUTE_DEVICE void finish_copies(BackwardWork const& work, uint32_t stage_index, FragmentS& tSrS,
                                 FragmentS& tdPrdP, Operand& tdVrP) {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    auto const& stage = shared.stages[stage_index];
    QueryPacking const packing = unpacked_queries();
    auto const tile = score_tile(work, stage.m_block, tSrS, packing);
    KeepTest const test(uint32_t(params.dropout.drop_count));
    Tensor sLse = row_numbers<Traits>(thread, shared.lse[stage_index]);      // (MMA, MMA_N, MMA_M)
    Tensor sDelta = row_numbers<Traits>(thread, shared.delta[stage_index]);  // (MMA, MMA_N, MMA_M)
    CUTE_UNROLL
    for (int k = 0; k < size<2>(tdVrP); ++k) {
      Tensor rZ = make_tensor<float>(Int<8>{});  // (8), in the order of the accumulator
      auto const copies = copies_of_scores<4, 2>(tile, 4 * k, 0, rZ);
      if constexpr (Traits::kBiasTiles) {
        if (call_has<kScoreMods, score_mods::Bias>(params)) {
          float const unit = Scores::Modifiers::exponent_scale(params);
          add_bias_step<BiasOfTranspose, kTileM>(arguments.bias, shared.bias_tile(stage_index), 0,
                                                 opaque(thread),
                                                 bias_per_unit(params, work.sequence, unit), k, rZ);
        }
      }
      Scores::template add_terms<Element>(params, stage, copies);
      if (work.tiles.masked(stage.m_block)) {
        mask_tile(work, stage.m_block, copies);
      }
      KeptBlock<Rows::Keys> kept{{~0u, ~0u}};
      if constexpr (kDrops) {
        if (call_has<kScoreMods, score_mods::Dropout>(params)) {
          kept = kept_block_of_transpose(tile, test, stage.words, 0, k);
        }
      }
      CUTE_UNROLL
      for (int i = 8 * k; i < 8 * k + 8; ++i) {
        float const grad_p = kept.keeps(i % 8) ? tdPrdP(i) : sDelta(i);
        tdPrdP(i) = grad_p * scores.factor(tSrS(i), rZ(i % 8), sLse(i));
      }
      convert_block(tSrS, k, tdVrP);
      kept.drop(tdVrP(_, 0, k));
    }
  }

  CUTE_DEVICE auto score_tile(BackwardWork const& work, int m_block, FragmentS& tSrS,
                              QueryPacking const& packing) const {
    return make_score_tile_of_transpose<kTileM, kTileN>(
        typename Traits::MmaS{}, opaque(thread), tSrS, work.sequence, packing, m_block * kTileM,
        work.tile.n_block * kTileN);
  }

  // The terms of the modifiers for a step, for scores.begin() and scores.finish().
  template <class Stage>
  CUTE_DEVICE auto terms_of(BackwardWork const& work, Stage const& stage, FragmentS& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    return Scores::terms(stage, [&] { return score_tile(work, stage.m_block, tSrS, packing); });
  }

  template <class Stage>
  CUTE_DEVICE void add_terms(BackwardWork const& work, Stage const& stage, FragmentS& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    Scores::template add_terms<Element>(arguments.params, stage,
                                        score_tile(work, stage.m_block, tSrS, packing));
  }

  // Sets hidden scores, and those of queries past the end of the sequence, to -infinity.
  CUTE_DEVICE void mask(BackwardWork const& work, int m_block, FragmentS& tSrS) {
    if (work.tiles.masked(m_block)) {
      QueryPacking const packing = unpacked_queries();
      mask_tile(work, m_block, score_tile(work, m_block, tSrS, packing));
    }
  }
  template <class Tile>
  CUTE_DEVICE static void mask_tile(BackwardWork const& work, int m_block, Tile const& tile) {
    mask_scores_by_side(tile);
    if ((m_block + 1) * kTileM > work.sequence.seqlen_q) {
      mask_missing_queries(tile);
    }
  }

  // Writes dS^T, as it is in registers for dK, where dQ reads it.
  CUTE_DEVICE void store_grad_s(Operand const& tdKrdS) {
    using namespace cute;
    auto const ring_s = grad_s_of(grads_before + 1);
    Barrier::wait(&shared.grad_s_empty[ring_s.stage], ring_s.parity ^ 1);
    Tensor sdSt = in_shared<typename Traits::SmemLayoutSt>(shared.grad_s);  // (N, M, STAGE)
    auto const thread_copy = typename Traits::SmemCopyS{}.get_slice(opaque(thread));
    Tensor rdS = make_tensor(tdKrdS.data(), FragmentS{}.layout());      // (MMA, MMA_N, MMA_M)
    Tensor source = thread_copy.retile_S(rdS);                          // (COPY, COPY_N, COPY_M)
    Tensor target = thread_copy.partition_D(sdSt(_, _, ring_s.stage));  // (COPY, COPY_N, COPY_M)
    copy(typename Traits::SmemCopyS{}, source, target);
    cutlass::arch::fence_view_async_shared();  // before WGMMAs read what these lanes wrote
    __syncwarp();
    arrive(shared.grad_s_full[ring_s.stage]);
  }

  // This warpgroup's part of dQ of the step before is there. `first`: there was no step before.
  //   tdQrdQ  (MMA, MMA_M, MMA_D)
  CUTE_DEVICE void hand_over_grad_q(BackwardWork const& work, bool first, FragmentQ& tdQrdQ) {
    cute::warpgroup_fence_operand(tdQrdQ);
    arrive(shared.grad_s_empty[grad_s_of(grads_before).stage]);
    if constexpr (!kWritesGradQ) {
      stage_grad_q(tdQrdQ);
    } else if (!first) {
      store_grad_queries<Traits>(arguments.params, work,
                                 shared.step_tiles[tile_slot(queries_of(steps_before - 1))],
                                 warpgroup, opaque(thread) % kWarpgroupThreads, tdQrdQ);
    }
  }

  // Hands dQ to the warp that adds it to its sums.
  //   tdQrdQ  (MMA, MMA_M, MMA_D)
  CUTE_DEVICE void stage_grad_q(FragmentQ const& tdQrdQ) {
    Barrier::wait(&shared.grad_q_empty[warpgroup], uint32_t(grads_before) % 2 ^ 1);
    auto* const staged = reinterpret_cast<float4*>(shared.grad_q[warpgroup]);
    int const lane = thread % kWarpgroupThreads;
    CUTE_UNROLL
    for (int v = 0; v < decltype(cute::size(tdQrdQ))::value / 4; ++v) {
      staged[vector_in_block<kWarpgroupThreads>(v, lane)] =
          make_float4(tdQrdQ(4 * v), tdQrdQ(4 * v + 1), tdQrdQ(4 * v + 2), tdQrdQ(4 * v + 3));
    }
    cutlass::arch::fence_view_async_shared();  // before the bulk add reads what these lanes wrote
    __syncwarp();
    arrive(shared.grad_q_full[warpgroup]);
  }
};

}  // namespace cute_attention::sm90
