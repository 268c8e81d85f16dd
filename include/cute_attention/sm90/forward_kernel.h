// sm90/forward_kernel.h: the sm90 forward kernel: a persistent grid of CTAs, a producer warp and
// consumer warpgroups.
#pragma once

#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/sm90/forward_compute.h"
#include "cute_attention/sm90/forward_load.h"
#include "cute_attention/sm90/forward_schedule.h"
#include "cute_attention/sm90/warp_roles.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardKernel {
  using Traits = ForwardTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // The roles of the CTA (warp_roles.h).
  CUTE_DEVICE static void set_up(ForwardArguments const& arguments, SharedMemory& shared) {
    prefetch_maps(arguments.map_q, arguments.map_k, arguments.map_v);
    if (Traits::kBiasTiles &&
        call_has<Traits::kKey.score_mods, score_mods::Bias>(arguments.params)) {
      prefetch_maps(arguments.bias.map);
    }
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    for (int stage = 0; stage < Traits::kStagesQ; ++stage) {
      init_barriers(shared.query_full[stage], 1, shared.query_empty[stage], kWarpgroupWarps);
    }
    init_barriers(shared.key_full, 1, shared.key_empty, kReaders);
    init_barriers(shared.value_full, 1, shared.value_empty, kReaders);
    init_barriers(shared.tile_full, 1, shared.tile_empty, kReaders + kLoadWarps<Row>);
    Barrier::init(&shared.next_wanted, 1);
    Barrier::init(&shared.value_landed, 1);
    if constexpr (Traits::kTellsUnusual) {
      for (uint32_t& number : shared.unusual) {
        number = 0;
      }
    }
  }

  CUTE_DEVICE static void produce(ForwardArguments const& arguments, SharedMemory& shared,
                                  int warp) {
    if constexpr (kReadsCache<Row>) {  // the launch does not wait for those who write the cache
      if (!begins_early(arguments.params)) {
        await_kernel_before();
      }
    }
    if (warp == 0) {
      constexpr Loads kLoads = kLoadWarps<Row> == 2 ? Loads::QueriesAndKeys : Loads::All;
      ForwardLoad<Row, kLoads>(arguments, shared).run();
      if constexpr (kReadsCache<Row>) {  // whoever waits for this kernel waits for that one, too
        await_kernel_before();
      }
    } else if (warp == 1) {
      schedule_tiles<Row>(arguments, shared);
    } else if (warp == 2) {
      if (has_splits(arguments.params) && threadIdx.x % 32 == 0) {
        start_kernel_after();  // the one that combines them
      }
      clear_unused_rows<typename Traits::Element>(arguments.params,
                                                  grid_warp(blockIdx.x, gridDim.x, 0, 32));
    } else if (kLoadWarps<Row> == 2) {
      ForwardLoad<Row, Loads::Values>(arguments, shared).run();
    }
  }

  CUTE_DEVICE static void consume(ForwardArguments const& arguments, SharedMemory& shared,
                                  int warpgroup) {
    ForwardCompute<Row>(arguments, shared, warpgroup, int(threadIdx.x) % kWarpgroupThreads).run();
  }

  CUTE_DEVICE static void run(ForwardArguments const& arguments, SharedMemory& shared) {
    if constexpr (Traits::kAlibiProduct) {
      shared.write_places();
    }
    // With every feature consumers have no register for the number of their warp.
    play_roles<ForwardKernel, serves_subsets(Row::kKey.score_mods)>(arguments, shared);
  }
};

}  // namespace cute_attention::sm90
