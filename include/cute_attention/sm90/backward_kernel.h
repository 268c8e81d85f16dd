// sm90/backward_kernel.h: the sm90 backward kernel: a persistent grid of CTAs. Each takes one block
// of keys of one KV head after the other, computes its dK and dV, and adds what the block gives to
// dQ to sums in global memory. A producer warpgroup and consumer warpgroups.
#pragma once

#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/sm90/backward_compute.h"
#include "cute_attention/sm90/backward_grad_bias.h"
#include "cute_attention/sm90/backward_load.h"
#include "cute_attention/sm90/backward_sum.h"
#include "cute_attention/sm90/grad_q_writer.h"
#include "cute_attention/sm90/warp_roles.h"

namespace cute_attention::sm90 {

//   kWritesGradQ  whether all that is added to dQ of a query comes from one block of keys
//                 (has_one_adder()). Then dQ is written to its place, and no sums are kept.
template <class Row, bool kWritesGradQ>
struct BackwardKernel {
  using Traits = BackwardTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;

  // The roles of the CTA (warp_roles.h).
  CUTE_DEVICE static void set_up(BackwardArguments const& arguments, SharedMemory& shared) {
    prefetch_maps(arguments.map_q, arguments.map_grad_o, arguments.map_k, arguments.map_v);
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    int const storers = Traits::kStoresGradS && arguments.stores_grad_bias ? 1 : 0;
    init_barriers(shared.work_full, 1, shared.work_empty,
                  kReaders + (kWritesGradQ ? 0 : Traits::kConsumers) + storers);
    init_barriers(shared.key_full, 1, shared.key_empty, kReaders);
    init_barriers(shared.value_full, 1, shared.value_empty, kReaders);
    init_barriers(shared.query_full, 2, shared.query_empty, kReaders);
    init_barriers(shared.grad_o_full, 2, shared.grad_o_empty, kReaders);
    init_barriers(shared.grad_s_full, kReaders, shared.grad_s_empty, kReaders + storers);
    init_barriers(shared.grad_q_full, kWarpgroupWarps, shared.grad_q_empty, 1);
    for (uint64_t& turn : shared.adder_turn) {
      Barrier::init(&turn, 1);
    }
    Barrier::init(&shared.landed, 1);
    if constexpr (Traits::kCountsHeads) {
      Barrier::init(&shared.writer.full, 1);
      Barrier::init(&shared.writer.ended, Traits::kConsumers);
    }
    if constexpr (Traits::kBiasOfWarpgroups) {
      auto& bias = shared.bias_barriers;
      init_barriers(bias.full, 1, bias.empty, kWarpgroupWarps);
    }
  }

  CUTE_DEVICE static void produce(BackwardArguments const& arguments, SharedMemory& shared,
                                  int warp) {
    if (warp == 0) {
      BackwardLoad<Traits>(arguments, shared).run();
      await_kernel_before();  // whoever waits for this kernel waits for that one, too
    } else if constexpr (!kWritesGradQ) {
      if (warp <= Traits::kConsumers) {
        add_grad_queries<Row>(arguments, shared, warp - 1);
      } else {
        if (arguments.params.seqlen_q > 0 && threadIdx.x % 32 == 0) {
          start_kernel_after();  // backward_finish, which follows where there are queries
        }
        if constexpr (Traits::kCountsHeads) {
          if (arguments.complete.left != nullptr) {
            GradQueryWriter<Row>{arguments, shared}.run();
          }
        }
      }
    }
    if constexpr (Traits::kStoresGradS) {
      static_assert(Traits::kConsumers + 1 < kWarpgroupWarps, "a warp more");
      if (warp == Traits::kConsumers + 1) {
        store_grad_scores<Row>(arguments, shared);
      }
    }
  }

  CUTE_DEVICE static void consume(BackwardArguments const& arguments, SharedMemory& shared,
                                  int warpgroup) {
    BackwardCompute<Row, kWritesGradQ>(arguments, shared, warpgroup,
                                       int(threadIdx.x) - kWarpgroupThreads)
        .run();
  }

  CUTE_DEVICE static void run(BackwardArguments const& arguments, SharedMemory& shared) {
    // If all roles shared one number of the warp, the compiler would spill it.
    play_roles<BackwardKernel, true>(arguments, shared);
  }
};

}  // namespace cute_attention::sm90
