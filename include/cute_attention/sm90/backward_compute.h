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
//
// A row for study may compute dQ in the same step after all (kGradQLag).
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/global_sum.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/sm90/backward_pointwise.h"
#include "cute_attention/sm90/backward_store.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/gemm.h"
#include "cute_attention/sm90/steps_of_64.h"

namespace cute_attention::sm90 {

//   kWritesGradQ  whether dQ of a step is written to its place. Else another warp adds it to sums.
template <class Row, bool kWritesGradQ>
struct BackwardCompute : BackwardPointwise<Row> {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Pointwise = BackwardPointwise<Row>;
  using FragmentS = typename Pointwise::FragmentS;
  using Operand = typename Pointwise::Operand;
  using Sums = KeyGradientSums<Traits, Traits::kFinishThreads>;
  using QueryRing = Ring<Traits::kStages>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  // To write dQ takes registers that are not there beside it, S and dP.
  static constexpr bool kGradQFirst = Traits::kGradQFirst && !kWritesGradQ;

  // Whether there are few registers beside S and dP: dQ takes them, or steps of 128 queries with a
  // bias do.
  static constexpr bool kFewRegisters = kGradQFirst || kHasStepsOf64<Row>;

  // Whether what the next block needs comes as early as it can. Then dV leaves while the other
  // warpgroup ends its last step.
  static constexpr bool kOverlapsBlocks = Traits::kOverlapsBlocks;

  template <class Mma, int kRows, int kCols>
  using Fragment = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  using FragmentK = Fragment<typename Traits::MmaK, kTileN, kHeadDim>;
  using FragmentV = Fragment<typename Traits::MmaV, kTileN, kHeadDimV>;
  using FragmentQ = Fragment<typename Traits::MmaQ, kWarpgroupM, Traits::kColsQ>;

  using Pointwise::arguments;
  using Pointwise::shared;
  using Pointwise::thread;
  int const warpgroup;  // of the consumers

  FragmentK tdKrdK;  // (MMA, MMA_N, MMA_D)
  FragmentV tdVrdV;  // (MMA, MMA_N, MMA_DV)
  // How many steps, and how many dS, there were before this step in all blocks of this CTA. Before
  // the first step of each block comes a dS that nobody writes. So their difference is the number
  // of blocks that had steps. Where dQ is not late there is no such dS, but it is counted.
  int32_t steps_before = 0;
  int32_t grads_before = 0;

  CUTE_DEVICE BackwardCompute(BackwardArguments const& arguments, SharedMemory& shared,
                              int warpgroup, int thread)
      : Pointwise(arguments, shared, thread), warpgroup(warpgroup) {}

  CUTE_DEVICE void run() {
    for (int32_t number = 0;; ++number) {
      auto const slot = buffer_of<kWorkSlots>(number);
      Barrier::wait(&shared.work_full[slot.stage], slot.parity);
      BackwardWork const& work = shared.works[slot.stage];
      if (work.is_end()) {
        break;
      }
      compute_keys(work);
      if (arguments.schedule.parts.count == 1) {
        // One after the other or row by row, the stores are the same; ptxas spills with the other
        // order in kernels on either side.
        if constexpr (kOverlapsBlocks) {
          store_grad_keys<Traits>(arguments.params, work, warpgroup, thread % kWarpgroupThreads,
                                  tdKrdK);
          if (work.steps.count == 0) {
            store_values(work);
          }
        } else {
          store_key_gradients<Traits>(arguments.params, work, warpgroup, thread % kWarpgroupThreads,
                                      tdKrdK, tdVrdV);
        }
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
    auto const ring_k = keys_of(grads_before - steps_before);
    Barrier::wait(&shared.key_full[ring_k.stage], ring_k.parity);
    if constexpr (!kOverlapsBlocks) {
      await_values();
    }
    // The first step also computes dQ of a step before it, which does not exist: from a dS that
    // nobody has written. The warp that adds dQ to its sums leaves this one out.
    if constexpr (Traits::kGradQLag > 0) {
      arrive(shared.grad_s_full[grad_s_of(number_of_dq()).stage]);
    }
    int remaining = count;
    do {
      compute_step(work, remaining == count, remaining == 1);
    } while (--remaining > 0);
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D): dQ of the last step
    if (kOverlapsBlocks && arguments.schedule.parts.count == 1) {
      store_values(work);
    }
    if constexpr (Traits::kGradQLag > 0) {
      await_grad_s();
      start_grad_q(tdQrdQ);
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tdKrdK);
    cute::warpgroup_fence_operand(tdVrdV);
    arrive(shared.key_empty[ring_k.stage]);
    if constexpr (kOverlapsBlocks) {
      release_queries();
    } else {
      arrive(shared.value_empty);
    }
    if constexpr (Traits::kGradQLag > 0) {
      hand_over_grad_q(work, false, tdQrdQ);
    }
    ++grads_before;
  }

  CUTE_DEVICE void store_values(BackwardWork const& work) {
    store_grad_values<Traits>(arguments.params, work, warpgroup, thread % kWarpgroupThreads,
                              tdVrdV);
  }

  CUTE_DEVICE static Ring<Traits::kStagesK> keys_of(int32_t number) {
    return buffer_of<Traits::kStagesK>(number);
  }

  // The number of the dS whose dQ a step computes, and of the one that it writes, of all of this
  // CTA.
  CUTE_DEVICE int32_t number_of_dq() const {
    return Traits::kGradQLag > 0 ? grads_before : steps_before;
  }
  CUTE_DEVICE int32_t number_of_ds() const { return number_of_dq() + Traits::kGradQLag; }

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

  CUTE_DEVICE void await_values() const {
    Barrier::wait(&shared.value_full, uint32_t(grads_before - steps_before) % 2);
  }

  // Where K of this block is.
  CUTE_DEVICE uint32_t key_stage() const { return keys_of(grads_before - steps_before).stage; }

  // Starts S^T = K Q^T with the Q of `ring`.
  CUTE_DEVICE void start_scores(FragmentS& tSrS, QueryRing const& ring) {
    using namespace cute;
    typename Traits::MmaS mma;
    Tensor sK = in_shared<typename Traits::SmemLayoutK>(shared.k);  // (N, D, STAGE)
    Tensor sQ = in_shared<typename Traits::SmemLayoutQ>(shared.q);  // (M, D, STAGE)
    auto const thread_mma = mma.get_slice(warpgroup * kWarpgroupThreads);
    Tensor tSrK = thread_mma.partition_fragment_A(sK);  // (MMA, MMA_N, MMA_D, STAGE)
    Tensor tSrQ = thread_mma.partition_fragment_B(sQ);  // (MMA, MMA_M, MMA_D, STAGE)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tSrK(_, _, _, key_stage()), tSrQ(_, _, _, ring.stage),
                                     tSrS);
  }

  // Starts dP^T = V dO^T, or dP^T + delta in accumulators that contain delta (kStartsWithDelta).
  CUTE_DEVICE void start_grad_p(FragmentS& tdPrdP, QueryRing const& ring) {
    using namespace cute;
    if constexpr (kOverlapsBlocks) {  // in each step: a branch would serialise the products
      await_values();
    }
    Barrier::wait(&shared.grad_o_full[ring.stage], ring.parity);
    if constexpr (Pointwise::kStartsWithDelta) {
      copy(row_numbers<Traits>(thread, shared.delta[ring.stage]), tdPrdP);
    }
    typename Traits::MmaS mma;
    Tensor sV = in_shared<typename Traits::SmemLayoutV>(shared.v);            // (N, DV, 1)
    Tensor sdO = in_shared<typename Traits::SmemLayoutGradO>(shared.grad_o);  // (M, DV, STAGE)
    auto const thread_mma = mma.get_slice(warpgroup * kWarpgroupThreads);
    Tensor tdPrV = thread_mma.partition_fragment_A(sV);    // (MMA, MMA_N, MMA_DV, 1)
    Tensor tdPrdO = thread_mma.partition_fragment_B(sdO);  // (MMA, MMA_M, MMA_DV, STAGE)
    start_gemm<Pointwise::kStartsWithDelta ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero>(
        mma, tdPrV(_, _, _, 0), tdPrdO(_, _, _, ring.stage), tdPrdP);
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

  // Waits until the dS of which dQ is computed is there, of all keys.
  CUTE_DEVICE void await_grad_s() const {
    auto const ring_s = grad_s_of(number_of_dq());
    Barrier::wait(&shared.grad_s_full[ring_s.stage], ring_s.parity);
  }

  // Starts this warpgroup's part of dQ = dS K.
  CUTE_DEVICE void start_grad_q(FragmentQ& tdQrdQ) {
    using namespace cute;
    auto const ring_s = grad_s_of(number_of_dq());
    typename Traits::MmaQ mma;
    Tensor sdS = in_shared<typename Traits::SmemLayoutS>(shared.grad_s);  // (M, N, STAGE)
    Tensor sKt = in_shared<typename Traits::SmemLayoutKt>(shared.k);      // (D, N, STAGE)
    Tensor sdS_part =                                                     // (64, N)
        local_tile(sdS, Shape<Int<kWarpgroupM>, Int<kTileN>>{},
                   make_coord(Traits::row_part_q(warpgroup), _0{}, ring_s.stage));
    Tensor sKt_part =  // (COLS_Q, N)
        local_tile(sKt, Shape<Int<Traits::kColsQ>, Int<kTileN>>{},
                   make_coord(Traits::col_part_q(warpgroup), _0{}, key_stage()));
    auto const thread_mma = mma.get_slice(0);
    Tensor tdQrdS = thread_mma.partition_fragment_A(sdS_part);  // (MMA, MMA_M, MMA_N)
    Tensor tdQrK = thread_mma.partition_fragment_B(sKt_part);   // (MMA, MMA_D, MMA_N)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tdQrdS, tdQrK, tdQrdQ);
  }

  // One step. If it is not the block's first, dK of the step before is under way, and dQ of it is
  // computed.
  CUTE_DEVICE void compute_step(BackwardWork const& work, bool first, bool last) {
    using namespace cute;
    FragmentS tSrS;    // (MMA, MMA_N, MMA_M): S^T, then P^T
    FragmentS tdPrdP;  // (MMA, MMA_N, MMA_M): dP^T + delta, then dS^T
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D): dQ of the step before
    Operand tdVrP;     // (MMA, MMA_N, MMA_M / 16)
    Operand tdKrdS;    // (MMA, MMA_N, MMA_M / 16)
    auto const ring = queries_of(steps_before);
    Barrier::wait(&shared.query_full[ring.stage], ring.parity);
    auto const key_bias = Pointwise::load_key_bias(work, ring.stage);
    start_scores(tSrS, ring);
    warpgroup_wait<1>();  // dK of the step before
    if (kOverlapsBlocks ? !first : steps_before > 0) {
      release_queries();
    }
    start_grad_p(tdPrdP, ring);
    if constexpr (kGradQFirst) {
      await_grad_s();
    }
    warpgroup_wait<1>();  // S
    warpgroup_fence_operand(tSrS);
    auto const lse = Pointwise::lse(ring.stage);  // (KEYS, QUERIES)
    auto const terms =
        Pointwise::template begin<kFewRegisters>(work, ring.stage, tSrS, lse, key_bias, tdVrP);
    if constexpr (kGradQFirst) {
      warpgroup_fence_operand(tSrS);  // P is computed before dQ takes its registers
      start_grad_q(tdQrdQ);
      warpgroup_wait<1>();  // dP
    } else {
      warpgroup_wait<0>();  // dP
    }
    warpgroup_fence_operand(tdPrdP);
    if (kOverlapsBlocks && last) {
      arrive(shared.value_empty);
    }
    // dV is not started before dP is there, so that P in 16 bits takes the registers of P.
    Pointwise::finish(work, ring.stage, terms, lse, tSrS, tdPrdP, tdVrP);
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

  // Writes dS^T, as it is in registers for dK, where dQ reads it.
  CUTE_DEVICE void store_grad_s(Operand const& tdKrdS) {
    using namespace cute;
    auto const ring_s = grad_s_of(number_of_ds());
    Barrier::wait(&shared.grad_s_empty[ring_s.stage], ring_s.parity ^ 1);
    Tensor sdSt = in_shared<typename Traits::SmemLayoutSt>(shared.grad_s);  // (N, M, STAGE)
    auto const thread_copy = typename Traits::SmemCopyS{}.get_slice(opaque(thread));
    Tensor rdS = make_tensor(tdKrdS.data(), FragmentS{}.layout());      // (MMA, MMA_N, MMA_M)
    Tensor source = thread_copy.retile_S(rdS);                          // (COPY, COPY_N, COPY_M)
    Tensor target = thread_copy.partition_D(sdSt(_, _, ring_s.stage));  // (COPY, COPY_N, COPY_M)
    copy(typename Traits::SmemCopyS{}, source, target);
    fence_shared_memory();  // before WGMMAs read what these lanes wrote
    __syncwarp();
    arrive(shared.grad_s_full[ring_s.stage]);
  }

  // This warpgroup's part of dQ is there. `first`: this is the first step of its block, so that dQ
  // is of no step where it is late.
  //   tdQrdQ  (MMA, MMA_M, MMA_D)
  CUTE_DEVICE void hand_over_grad_q(BackwardWork const& work, bool first, FragmentQ& tdQrdQ) {
    cute::warpgroup_fence_operand(tdQrdQ);
    arrive(shared.grad_s_empty[grad_s_of(number_of_dq()).stage]);
    if constexpr (!kWritesGradQ) {
      stage_grad_q(tdQrdQ);
    } else if (Traits::kGradQLag == 0 || !first) {
      auto const ring = queries_of(steps_before - Traits::kGradQLag);
      store_grad_queries<Traits>(arguments.params, work, shared.step_tiles[tile_slot(ring)],
                                 warpgroup, opaque(thread) % kWarpgroupThreads, tdQrdQ);
    }
  }

  // Hands dQ to the warp that adds it to its sums.
  //   tdQrdQ  (MMA, MMA_M, MMA_D)
  CUTE_DEVICE void stage_grad_q(FragmentQ const& tdQrdQ) {
    Barrier::wait(&shared.grad_q_empty[warpgroup], uint32_t(number_of_dq()) % 2 ^ 1);
    auto* const staged = reinterpret_cast<float4*>(shared.grad_q[warpgroup]);
    int const lane = thread % kWarpgroupThreads;
    CUTE_UNROLL
    for (int v = 0; v < decltype(cute::size(tdQrdQ))::value / 4; ++v) {
      staged[vector_in_block<kWarpgroupThreads>(v, lane)] =
          make_float4(tdQrdQ(4 * v), tdQrdQ(4 * v + 1), tdQrdQ(4 * v + 2), tdQrdQ(4 * v + 3));
    }
    fence_shared_memory();  // before the bulk add reads what these lanes wrote
    __syncwarp();
    arrive(shared.grad_q_full[warpgroup]);
  }
};

}  // namespace cute_attention::sm90
