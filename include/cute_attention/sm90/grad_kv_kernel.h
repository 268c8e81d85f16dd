// sm90/grad_kv_kernel.h: the kernel that computes dK and dV where no sums of dQ are kept: a
// persistent grid of CTAs, each of which takes one block of keys of one KV head after the other. A
// producer warpgroup, one that computes dV and one that computes dK.
#pragma once

#include "cute_attention/sm90/backward_load.h"
#include "cute_attention/sm90/grad_kv_compute.h"
#include "cute_attention/sm90/warp_roles.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradKvKernel {
  using Traits = GradKvTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // The roles of the CTA (warp_roles.h).
  CUTE_DEVICE static void set_up(BackwardArguments const& arguments, SharedMemory& shared) {
    prefetch_maps(arguments.map_q, arguments.map_grad_o, arguments.map_k, arguments.map_v);
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    init_barriers(shared.work_full, 1, shared.work_empty, kReaders);
    init_barriers(shared.key_full, 1, shared.key_empty, kWarpgroupWarps);
    init_barriers(shared.value_full, 1, shared.value_empty, kWarpgroupWarps);
    init_barriers(shared.query_full, 2, shared.query_empty, kReaders);
    init_barriers(shared.grad_o_full, 2, shared.grad_o_empty, kReaders);
    init_barriers(shared.factor_full, kWarpgroupWarps, shared.factor_empty, kWarpgroupWarps);
    Barrier::init(&shared.landed, 1);
  }

  CUTE_DEVICE static void produce(BackwardArguments const& arguments, SharedMemory& shared,
                                  int warp) {
    if (warp == 0) {
      BackwardLoad<Traits>(arguments, shared).run();
    }
  }

  CUTE_DEVICE static void consume(BackwardArguments const& arguments, SharedMemory& shared,
                                  int warpgroup) {
    int const thread = int(threadIdx.x) % kWarpgroupThreads;
    if (warpgroup == Traits::kOfV) {
      GradVCompute<Row>(arguments, shared, thread).run();
    } else {
      GradKCompute<Row>(arguments, shared, thread).run();
    }
  }

  CUTE_DEVICE static void run(BackwardArguments const& arguments, SharedMemory& shared) {
    play_roles<GradKvKernel>(arguments, shared);
  }
};

}  // namespace cute_attention::sm90
