// sm90/grad_q_kernel.h: the kernel that computes dQ where no sums of dQ are kept: a persistent grid
// of CTAs, each of which takes one tile of queries after the other. A producer warp and consumer
// warpgroups.
#pragma once

#include "cute_attention/sm90/grad_q_compute.h"
#include "cute_attention/sm90/grad_q_load.h"
#include "cute_attention/sm90/warp_roles.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradQKernel {
  using Traits = GradQTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // The roles of the CTA (warp_roles.h).
  CUTE_DEVICE static void set_up(BackwardArguments const& arguments, SharedMemory& shared) {
    prefetch_maps(arguments.map_q, arguments.map_grad_o, arguments.map_k, arguments.map_v);
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    init_barriers(shared.work_full, 1, shared.work_empty, kReaders);
    init_barriers(shared.query_full, 1, shared.query_empty, kReaders);
    init_barriers(shared.grad_o_full, 1, shared.grad_o_empty, kReaders);
    init_barriers(shared.key_full, 1, shared.key_empty, kReaders);
    init_barriers(shared.value_full, 1, shared.value_empty, kReaders);
    Barrier::init(&shared.landed, 1);
  }

  CUTE_DEVICE static void produce(BackwardArguments const& arguments, SharedMemory& shared,
                                  int warp) {
    if (warp == 0) {
      GradQLoad<Row>(arguments, shared).run();
    }
  }

  CUTE_DEVICE static void consume(BackwardArguments const& arguments, SharedMemory& shared,
                                  int warpgroup) {
    GradQCompute<Row>(arguments, shared, warpgroup, int(threadIdx.x) % kWarpgroupThreads).run();
  }

  CUTE_DEVICE static void run(BackwardArguments const& arguments, SharedMemory& shared) {
    play_roles<GradQKernel>(arguments, shared);
  }
};

}  // namespace cute_attention::sm90
