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
// Calls with few keys, where there is no other warpgroup to wait for (few_keys.h), and rows for
// study compute dQ in the same step after all (kGradQLag). The order where registers hold still
// less is in backward_chunks.h.
//
// What a step writes to shared memory, dS and dQ, others may read behind a fence, which waits until
// all of it is written. Products of 64 columns take all that shared memory gives, and stores wait
// for them: at head dim 128 a warpgroup stood at the two fences of a step for 17 % of its time. So
// the step goes on without a fence, and tells of dS and dQ when S and dP of the next one are under
// way (kTellsLate). Nothing may come between S and dP then: a load of delta would wait behind the
// stores. So delta is added to dP, and is not what its accumulators begin with.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/sm90/backward_chunks.h"
#include "cute_attention/sm90/backward_products.h"
#include "cute_attention/sm90/backward_store.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/steps_of_64.h"

namespace cute_attention::sm90 {

//   kWritesGradQ  whether dQ of a step is written to its place. Else another warp adds it to sums.
template <class Row, bool kWritesGradQ>
struct BackwardCompute : BackwardChunks<Row, kWritesGradQ> {
  using Products = BackwardProducts<Row, kWritesGradQ>;
  using typename Products::FragmentQ;
  using typename Products::FragmentS;
  using typename Products::Operand;
  using typename Products::Pointwise;
  using typename Products::Traits;
  using Sums = KeyGradientSums<Traits, Traits::kFinishThreads>;
  // To write dQ takes registers that are not there beside it, S and dP.
  static constexpr bool kGradQFirst = Traits::kGradQFirst && !kWritesGradQ;

  // Whether there are few registers beside S and dP: dQ takes them, or steps of 128 queries with a
  // bias do.
  static constexpr bool kFewRegisters = kGradQFirst || kHasStepsOf64<Row>;

  using BackwardChunks<Row, kWritesGradQ>::BackwardChunks;
  using Products::arguments, Products::grads_before, Products::kOverlapsBlocks, Products::shared,
      Products::steps_before, Products::tdKrdK, Products::tdVrdV, Products::thread,
      Products::warpgroup;

  CUTE_DEVICE void run() {
    if constexpr (kOverlapsBlocks) {
      compute_overlapping_blocks();
    } else {
      compute_blocks();
    }
  }

 private:
  using Products::arrive, Products::await_grad_s, Products::await_values, Products::grad_s_of,
      Products::hand_over_grad_q, Products::key_stage, Products::keys_of, Products::number_of_dq,
      Products::queries_of, Products::release_queries, Products::start_grad_k,
      Products::start_grad_p, Products::start_grad_q, Products::start_grad_v,
      Products::start_scores, Products::store_grad_s, Products::tell_of_grad_q,
      Products::tell_of_grad_s, Products::tell_of_step;

  // One block after the other: the last step of each is followed by its dQ.
  CUTE_DEVICE void compute_blocks() {
    for (int32_t number = 0;; ++number) {
      BackwardWork const& work = await_work(number);
      if (work.is_end()) {
        break;
      }
      compute_keys(work);
      store(work);
      release_work(number);
    }
  }

  // Where blocks overlap: the last step of a block leaves its dQ to the first step of the next one.
  // If that has no steps, or there is none, dQ is computed in between.
  CUTE_DEVICE void compute_overlapping_blocks() {
    bool has_before = false;  // a step whose dQ is not computed yet
    uint32_t stage_k = 0;
    for (int32_t number = 0;; ++number) {
      bool const end = await_work(number).is_end();
      int32_t remaining = end ? 0 : work_of(number).steps.count;
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(tdKrdK);
      cute::warpgroup_fence_operand(tdVrdV);
      if (number > 0) {
        store(work_of(number - 1));
      }
      if (has_before && remaining == 0) {
        compute_last_grad_q(work_of(number - 1), stage_k ^ 1);
        has_before = false;
      }
      if (number > 0 && !has_before) {
        release_work(number - 1);
      }
      if (end) {
        break;
      }
      cute::clear(tdKrdK);
      cute::clear(tdVrdV);
      if (remaining == 0) {
        continue;
      }
      if (!has_before) {
        start_without_step();
      }
      bool first = true;
      do {
        compute_step(work_of(number), work_of(number - (first && has_before ? 1 : 0)), first,
                     remaining == 1, has_before, stage_k);
        if (first && has_before) {
          arrive(shared.key_empty[stage_k ^ 1]);
          release_work(number - 1);
        }
        first = false;
        has_before = true;
      } while (--remaining > 0);
      if constexpr (Traits::kTellsLate) {
        tell_of_step(true);
      }
      stage_k ^= 1;
    }
  }

  CUTE_DEVICE BackwardWork const& work_of(int32_t number) const {
    return shared.works[buffer_of<kWorkSlots>(number).stage];
  }
  CUTE_DEVICE BackwardWork const& await_work(int32_t number) const {
    auto const slot = buffer_of<kWorkSlots>(number);
    Barrier::wait(&shared.work_full[slot.stage], slot.parity);
    return shared.works[slot.stage];
  }
  CUTE_DEVICE void release_work(int32_t number) {
    __syncwarp();  // all lanes have read the work
    arrive(shared.work_empty[buffer_of<kWorkSlots>(number).stage]);
  }

  // Writes dK and dV of a block, or the sums of a part.
  CUTE_DEVICE void store(BackwardWork const& work) {
    int const own = kOverlapsBlocks ? opaque(thread) : thread;  // few registers
    if (!arguments.schedule.is_divided(work.tile)) {
      store_key_gradients<Traits>(arguments.params, work, warpgroup, own % kWarpgroupThreads,
                                  tdKrdK, tdVrdV);
    } else if (work.steps.count > 0) {
      using MmaK = typename Traits::MmaK;
      using MmaV = typename Traits::MmaV;
      float* const target = Sums::block(arguments.params, arguments.schedule, work.sequence,
                                        work.tile, work.tile.part);
      Sums::template store<MmaK, MmaV>(target, work.sequence, work.tile, own, tdKrdK, tdVrdV);
    }
  }

  // The next step also computes dQ of a step before it, which does not exist: from a dS that nobody
  // has written. The warp that adds dQ to its sums leaves this one out.
  CUTE_DEVICE void start_without_step() {
    if constexpr (Traits::kGradQLag > 0) {
      arrive(shared.grad_s_full[grad_s_of(number_of_dq()).stage]);
    }
  }

  // Computes dQ of a step that no other step follows.
  CUTE_DEVICE void compute_last_grad_q(BackwardWork const& work, uint32_t stage_k) {
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D)
    await_grad_s();
    start_grad_q(tdQrdQ, stage_k);
    cute::warpgroup_wait<0>();
    arrive(shared.key_empty[stage_k]);
    hand_over_grad_q(work, true, tdQrdQ);
    tell_of_grad_q();
    ++grads_before;
  }

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
    await_values();
    start_without_step();
    int remaining = count;
    do {
      if constexpr (Traits::kInChunks) {
        this->compute_step_in_chunks(work, remaining == count);
      } else {
        compute_step(work, work, remaining == count, false, remaining != count, ring_k.stage);
      }
    } while (--remaining > 0);
    if constexpr (Traits::kTellsLate) {
      tell_of_step(true);
    }
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D): dQ of the last step
    if constexpr (Traits::kGradQLag > 0) {
      await_grad_s();
      start_grad_q(tdQrdQ, key_stage());
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tdKrdK);
    cute::warpgroup_fence_operand(tdVrdV);
    arrive(shared.key_empty[ring_k.stage]);
    arrive(shared.value_empty);
    if constexpr (Traits::kGradQLag > 0) {
      hand_over_grad_q(work, true, tdQrdQ);
      tell_of_grad_q();
    }
    ++grads_before;
  }

  // One step. dK of the step before is under way, if that is of the same block.
  //   before      the work of the step before, whose dQ is computed
  //   first       whether this is the first step of its block; last, likewise
  //   has_before  whether there is a step before, with a dQ that is to be computed
  //   stage_k     where K of the block is
  CUTE_DEVICE void compute_step(BackwardWork const& work, BackwardWork const& before, bool first,
                                bool last, bool has_before, uint32_t stage_k) {
    using namespace cute;
    FragmentS tSrS;    // (MMA, MMA_N, MMA_M): S^T, then P^T
    FragmentS tdPrdP;  // (MMA, MMA_N, MMA_M): dP^T + delta, then dS^T
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D): dQ of the step before
    Operand tdVrP;     // (MMA, MMA_N, MMA_M / 16)
    Operand tdKrdS;    // (MMA, MMA_N, MMA_M / 16)
    auto const ring = queries_of(steps_before);
    Barrier::wait(&shared.query_full[ring.stage], ring.parity);
    auto const key_bias = Pointwise::load_key_bias(work, ring.stage);
    start_scores(tSrS, ring, stage_k);
    warpgroup_wait<1>();  // dK of the step before
    if (steps_before > 0) {
      release_queries();
    }
    start_grad_p(tdPrdP, ring);
    if constexpr (Traits::kTellsLate) {
      tell_of_step(!first);
    }
    if constexpr (kGradQFirst) {
      await_grad_s();
    }
    auto const asked = Pointwise::ask(work, ring.stage);
    warpgroup_wait<1>();  // S
    warpgroup_fence_operand(tSrS);
    auto const lse = Pointwise::lse(ring.stage, asked);  // (KEYS, QUERIES)
    auto const terms =
        Pointwise::template begin<kFewRegisters>(work, ring.stage, tSrS, lse, key_bias, tdVrP);
    if constexpr (kGradQFirst) {
      warpgroup_fence_operand(tSrS);  // P is computed before dQ takes its registers
      start_grad_q(tdQrdQ, kOverlapsBlocks && first ? stage_k ^ 1 : stage_k);
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
      hand_over_grad_q(before, has_before, tdQrdQ);
      tell_of_grad_q();
      store_grad_s(tdKrdS);
      tell_of_grad_s();
    } else {
      store_grad_s(tdKrdS);
      if constexpr (!Traits::kTellsLate) {
        tell_of_grad_s();
      }
      await_grad_s();
      start_grad_q(tdQrdQ, kOverlapsBlocks && first ? stage_k ^ 1 : stage_k);
      start_grad_k(tdKrdS, ring);
      warpgroup_wait<1>();  // dV and dQ
      hand_over_grad_q(before, Traits::kGradQLag == 0 || has_before, tdQrdQ);
      if constexpr (!Traits::kTellsLate) {
        tell_of_grad_q();
      }
    }
    // dV. dK stays under way: with both, ptxas would run out of registers and let no two products
    // overlap (C7512).
    warpgroup_wait<1>();
    ++steps_before;
    ++grads_before;
  }
};

}  // namespace cute_attention::sm90
