// sm90/grad_kv_kernel.h: the kernel that computes dK and dV where no sums of dQ are kept: a
// persistent grid of CTAs, each of which takes one block of keys of one KV head after the other. A
// producer warpgroup, one that computes dV and one that computes dK.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_attention/sm90/backward_load.h"
#include "cute_attention/sm90/grad_kv_compute.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradKvKernel {
  using Traits = GradKvTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // One thread sets the barriers up, with the arrivals that complete a phase.
  CUTE_DEVICE static void init_barriers(SharedMemory& shared) {
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    for (int slot = 0; slot < kWorkSlots; ++slot) {
      Barrier::init(&shared.work_full[slot], 1);
      Barrier::init(&shared.work_empty[slot], kReaders);
    }
    for (int stage = 0; stage < Traits::kStagesK; ++stage) {
      Barrier::init(&shared.key_full[stage], 1);
      Barrier::init(&shared.key_empty[stage], kWarpgroupWarps);
    }
    Barrier::init(&shared.value_full, 1);
    Barrier::init(&shared.value_empty, kWarpgroupWarps);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      Barrier::init(&shared.query_full[stage], 1 + 32);
      Barrier::init(&shared.query_empty[stage], kReaders);
      Barrier::init(&shared.grad_o_full[stage], 1 + 32);
      Barrier::init(&shared.grad_o_empty[stage], kReaders);
    }
    for (int stage = 0; stage < Traits::kStagesFactor; ++stage) {
      Barrier::init(&shared.factor_full[stage], kWarpgroupWarps);
      Barrier::init(&shared.factor_empty[stage], kWarpgroupWarps);
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

    int const warpgroup = warp / kWarpgroupWarps - 1;  // of the consumers
    if (warpgroup < 0) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::Registers::kProducer>();
      if (warp == 0) {
        BackwardLoad<Traits>(arguments, shared).run();
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::Registers::kConsumer>();
      if (warpgroup == Traits::kOfV) {
        GradVCompute<Row>(arguments, shared, thread % kWarpgroupThreads).run();
      } else {
        GradKCompute<Row>(arguments, shared, thread % kWarpgroupThreads).run();
      }
    }
  }
};

}  // namespace cute_attention::sm90
