// sm90/mla_kernel.h: the sm90 forward kernel for rows with qv (docs/mla.md): a persistent grid of
// CTAs, a producer warpgroup and two consumer warpgroups.
#pragma once

#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/sm90/forward_schedule.h"
#include "cute_attention/sm90/mla_left.h"
#include "cute_attention/sm90/mla_load.h"
#include "cute_attention/sm90/mla_right.h"
#include "cute_attention/sm90/warp_roles.h"

namespace cute_attention::sm90 {

template <class Row>
struct MlaKernel {
  using Traits = MlaTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // The roles of the CTA (warp_roles.h).
  CUTE_DEVICE static void set_up(ForwardArguments const& arguments, SharedMemory& shared) {
    prefetch_maps(arguments.map_q, arguments.map_qv, arguments.map_k, arguments.map_v);
    init_barriers(shared.query_full, 1, shared.query_empty, kWarpgroupWarps);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      init_barriers(shared.part_full[stage], 1, shared.part_empty[stage], kWarpgroupWarps);
    }
    init_barriers(shared.exchange.full, kWarpgroupWarps, shared.exchange.empty, kWarpgroupWarps);
    init_barriers(shared.tile_full, 1, shared.tile_empty, Traits::kConsumers * kWarpgroupWarps + 1);
    Barrier::init(&shared.landed[kLeft], 1);
    Barrier::init(&shared.landed[kRight], 1);
  }

  CUTE_DEVICE static void produce(ForwardArguments const& arguments, SharedMemory& shared,
                                  int warp) {
    if constexpr (kReadsCache<Row>) {  // the launch does not wait for those who write the cache
      await_kernel_before();
    }
    if (warp == 0) {
      MlaLoad<Row>(arguments, shared).run();
    } else if (warp == 1) {
      schedule_tiles<Row>(arguments, shared);
    } else if (warp == 2) {
      clear_unused_rows<typename Traits::Element>(arguments.params,
                                                  grid_warp(blockIdx.x, gridDim.x, 0, 32));
    }
  }

  CUTE_DEVICE static void consume(ForwardArguments const& arguments, SharedMemory& shared,
                                  int warpgroup) {
    int const thread = int(threadIdx.x) % kWarpgroupThreads;
    if (warpgroup == kLeft) {
      MlaLeft<Row>(arguments, shared, thread).run();
    } else {
      MlaRight<Row>(arguments, shared, thread).run();
    }
  }

  CUTE_DEVICE static void run(ForwardArguments const& arguments, SharedMemory& shared) {
    play_roles<MlaKernel>(arguments, shared);
  }
};

}  // namespace cute_attention::sm90
