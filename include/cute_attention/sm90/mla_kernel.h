// sm90/mla_kernel.h: the sm90 forward kernel for rows with qv (docs/mla.md): a persistent grid of
// CTAs, a producer warpgroup and two consumer warpgroups.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_attention/core/unused_rows.h"
#include "cute_attention/sm90/forward_schedule.h"
#include "cute_attention/sm90/mla_left.h"
#include "cute_attention/sm90/mla_load.h"
#include "cute_attention/sm90/mla_right.h"

namespace cute_attention::sm90 {

template <class Row>
struct MlaKernel {
  using Traits = MlaTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // One thread sets the barriers up, with the arrivals that complete a phase.
  CUTE_DEVICE static void init_barriers(SharedMemory& shared) {
    Barrier::init(&shared.query_full, 1);
    Barrier::init(&shared.query_empty, kWarpgroupWarps);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      for (int part = 0; part < kParts; ++part) {
        Barrier::init(&shared.part_full[stage][part], 1);
        Barrier::init(&shared.part_empty[stage][part], kWarpgroupWarps);
      }
    }
    Barrier::init(&shared.exchange.full, kWarpgroupWarps);
    Barrier::init(&shared.exchange.empty, kWarpgroupWarps);
    for (int slot = 0; slot < kTileSlots; ++slot) {
      Barrier::init(&shared.tile_full[slot], 1);
      Barrier::init(&shared.tile_empty[slot], Traits::kConsumers * kWarpgroupWarps + 1);
    }
    Barrier::init(&shared.landed[kLeft], 1);
    Barrier::init(&shared.landed[kRight], 1);
    cutlass::arch::fence_barrier_init();
  }

  CUTE_DEVICE static void run(ForwardArguments const& arguments, SharedMemory& shared) {
    int const thread = int(threadIdx.x);
    int const warp = warp_uniform(thread / 32);
    if (thread == 0) {
      cute::prefetch_tma_descriptor(&arguments.map_q);
      cute::prefetch_tma_descriptor(&arguments.map_qv);
      cute::prefetch_tma_descriptor(&arguments.map_k);
      cute::prefetch_tma_descriptor(&arguments.map_v);
      init_barriers(shared);
    }
    __syncthreads();  // the barriers are there

    if (warp < kWarpgroupWarps) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      if (warp == 0) {
        MlaLoad<Row>(arguments, shared).run();
      } else if (warp == 1) {
        schedule_tiles<Row>(arguments, shared);
      } else if (warp == 2) {
        clear_unused_rows<typename Traits::Element>(arguments.params,
                                                    grid_warp(blockIdx.x, gridDim.x, 0, 32));
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      int const own = thread % kWarpgroupThreads;
      if (warp < 2 * kWarpgroupWarps) {
        MlaLeft<Row>(arguments, shared, own).run();
      } else {
        MlaRight<Row>(arguments, shared, own).run();
      }
    }
  }
};

}  // namespace cute_attention::sm90
