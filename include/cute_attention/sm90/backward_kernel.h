// sm90/backward_kernel.h: the sm90 backward kernel: a persistent grid of CTAs. Each takes one block
// of keys of one KV head after the other, computes its dK and dV, and adds what the block gives to
// dQ to sums in global memory. A producer warpgroup and consumer warpgroups.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_attention/sm90/backward_compute.h"
#include "cute_attention/sm90/backward_load.h"
#include "cute_attention/sm90/backward_sum.h"
#include "cute_attention/sm90/backward_upkeep.h"

namespace cute_attention::sm90 {

//   kWritesGradQ  whether all that is added to dQ of a query comes from one block of keys
//                 (has_one_adder()). Then dQ is written to its place, and no sums are kept.
template <class Row, bool kWritesGradQ>
struct BackwardKernel {
  using Traits = BackwardTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // One thread sets the barriers up, with the arrivals that complete a phase.
  CUTE_DEVICE static void init_barriers(SharedMemory& shared) {
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    for (int slot = 0; slot < kWorkSlots; ++slot) {
      Barrier::init(&shared.work_full[slot], 1);
      Barrier::init(&shared.work_empty[slot],
                    kReaders + (kWritesGradQ ? 0 : Traits::kConsumers + Traits::kUpkeep));
    }
    for (int stage = 0; stage < Traits::kStagesK; ++stage) {
      Barrier::init(&shared.key_full[stage], 1);
      Barrier::init(&shared.key_empty[stage], kReaders);
    }
    Barrier::init(&shared.value_full, 1);
    Barrier::init(&shared.value_empty, kReaders);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      Barrier::init(&shared.query_full[stage], 1 + 32);
      Barrier::init(&shared.query_empty[stage], kReaders);
      Barrier::init(&shared.grad_o_full[stage], 1 + 32);
      Barrier::init(&shared.grad_o_empty[stage], kReaders);
    }
    for (int stage = 0; stage < Traits::kStagesS; ++stage) {
      Barrier::init(&shared.grad_s_full[stage], kReaders);
      Barrier::init(&shared.grad_s_empty[stage], kReaders);
    }
    for (int part = 0; part < Traits::kConsumers; ++part) {
      Barrier::init(&shared.grad_q_full[part], kWarpgroupWarps);
      Barrier::init(&shared.grad_q_empty[part], 1);
    }
    Barrier::init(&shared.landed, 1);
    cutlass::arch::fence_barrier_init();
  }

  CUTE_DEVICE static void run(BackwardArguments const& arguments, SharedMemory& shared) {
    if (threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(&arguments.map_q);
      cute::prefetch_tma_descriptor(&arguments.map_grad_o);
      cute::prefetch_tma_descriptor(&arguments.map_k);
      cute::prefetch_tma_descriptor(&arguments.map_v);
      init_barriers(shared);
    }
    __syncthreads();  // the barriers are there

    // Each role computes the number of its warp anew. If all shared one that is computed here, the
    // compiler would spill it.
    if (warp_of_cta() < kWarpgroupWarps) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::Registers::kProducer>();
      int const warp = warp_of_cta();
      if (warp == 0) {
        BackwardLoad<Traits>(arguments, shared).run();
      } else if (!kWritesGradQ && warp <= Traits::kConsumers) {
        add_grad_queries<Row>(arguments, shared, warp - 1);
      } else if constexpr (Traits::kUpkeep && !kWritesGradQ) {
        BackwardUpkeep<Row>{arguments, shared}.run();
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::Registers::kConsumer>();
      BackwardCompute<Row, kWritesGradQ>(arguments, shared, warp_of_cta() / kWarpgroupWarps - 1,
                                         int(threadIdx.x) - kWarpgroupThreads)
          .run();
    }
  }
};

}  // namespace cute_attention::sm90
