// sm90/forward_kernel.h: the sm90 forward kernel: a persistent grid of CTAs, a producer warp and
// consumer warpgroups.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/sm90/forward_compute.h"
#include "cute_attention/sm90/forward_load.h"
#include "cute_attention/sm90/forward_schedule.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardKernel {
  using Traits = ForwardTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // One thread sets the barriers up, with the arrivals that complete a phase.
  CUTE_DEVICE static void init_barriers(SharedMemory& shared) {
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    for (int i = 0; i < Traits::kStagesQ * Traits::kConsumers; ++i) {
      Barrier::init(&shared.query_full[0][i], 1);
      Barrier::init(&shared.query_empty[0][i], kWarpgroupWarps);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      Barrier::init(&shared.key_full[stage], 1);
      Barrier::init(&shared.key_empty[stage], kReaders);
      Barrier::init(&shared.value_full[stage], 1);
      Barrier::init(&shared.value_empty[stage], kReaders);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      Barrier::init(&shared.tile_full[slot], 1);
      Barrier::init(&shared.tile_empty[slot], kReaders + 1);
    }
    Barrier::init(&shared.value_landed, 1);
    cutlass::arch::fence_barrier_init();
  }

  CUTE_DEVICE static void run(ForwardArguments const& arguments, SharedMemory& shared) {
    int const thread = int(threadIdx.x);
    int const warp = warp_uniform(thread / 32);
    if (thread == 0) {
      cute::prefetch_tma_descriptor(&arguments.map_q);
      cute::prefetch_tma_descriptor(&arguments.map_k);
      cute::prefetch_tma_descriptor(&arguments.map_v);
      if (Traits::kBiasTiles &&
          call_has<Traits::kKey.score_mods, score_mods::Bias>(arguments.params)) {
        cute::prefetch_tma_descriptor(&arguments.bias.map);
      }
      init_barriers(shared);
    }
    __syncthreads();  // the barriers are there

    if (warp < kWarpgroupWarps) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      if (warp == 0) {
        ForwardLoad<Row>(arguments, shared).run();
      } else if (warp == 1) {
        schedule_tiles<Row>(arguments, shared);
      } else if (warp == 2) {
        if (has_splits(arguments.params) && thread % 32 == 0) {
          start_kernel_after();  // the one that combines them
        }
        clear_unused_rows<typename Traits::Element>(arguments.params,
                                                    grid_warp(blockIdx.x, gridDim.x, 0, 32));
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      ForwardCompute<Row>(arguments, shared, warp / kWarpgroupWarps - 1, thread % kWarpgroupThreads)
          .run();
    }
  }
};

}  // namespace cute_attention::sm90
