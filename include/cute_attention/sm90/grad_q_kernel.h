// sm90/grad_q_kernel.h: the kernel that computes dQ where no sums of dQ are kept: a persistent grid
// of CTAs, each of which takes one tile of queries after the other. A producer warp and consumer
// warpgroups.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_attention/sm90/grad_q_compute.h"
#include "cute_attention/sm90/grad_q_load.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradQKernel {
  using Traits = GradQTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // One thread sets the barriers up, with the arrivals that complete a phase.
  CUTE_DEVICE static void init_barriers(SharedMemory& shared) {
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    for (int slot = 0; slot < kWorkSlots; ++slot) {
      Barrier::init(&shared.work_full[slot], 1);
      Barrier::init(&shared.work_empty[slot], kReaders);
    }
    Barrier::init(&shared.query_full, 1);
    Barrier::init(&shared.query_empty, kReaders);
    Barrier::init(&shared.grad_o_full, 1);
    Barrier::init(&shared.grad_o_empty, kReaders);
    for (int stage = 0; stage < Traits::kStagesK; ++stage) {
      Barrier::init(&shared.key_full[stage], 1);
      Barrier::init(&shared.key_empty[stage], kReaders);
    }
    for (int stage = 0; stage < Traits::kStagesV; ++stage) {
      Barrier::init(&shared.value_full[stage], 1);
      Barrier::init(&shared.value_empty[stage], kReaders);
    }
    Barrier::init(&shared.landed, 1);
    cutlass::arch::fence_barrier_init();
  }

  CUTE_DEVICE static void run(BackwardArguments const& arguments, SharedMemory& shared) {
    int const thread = int(threadIdx.x);
    int const warp = warp_uniform(thread / 32);
    if (thread == 0) {
      cute::prefetch_tma_descriptor(&arguments.map_q);
      cute::prefetch_tma_descriptor(&arguments.map_grad_o);
      cute::prefetch_tma_descriptor(&arguments.map_k);
      cute::prefetch_tma_descriptor(&arguments.map_v);
      init_barriers(shared);
    }
    __syncthreads();  // the barriers are there

    if (warp < kWarpgroupWarps) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::Registers::kProducer>();
      if (warp == 0) {
        GradQLoad<Row>(arguments, shared).run();
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::Registers::kConsumer>();
      GradQCompute<Row>(arguments, shared, warp / kWarpgroupWarps - 1, thread % kWarpgroupThreads)
          .run();
    }
  }
};

}  // namespace cute_attention::sm90
