// sm90/grad_bias_kernel.h: the sm90 kernel that computes the gradient of a bias, after the kernels
// that compute those of q, k and v: a persistent grid of CTAs, each of which takes a run of tiles
// of the gradient, or a part of the visits of a tile, after the other (core/grad_bias_tiles.h). A
// producer warp and two consumer warpgroups.
//
// It computes S and dP anew, two of the backward's five products. Nothing is added in global
// memory, and the gradient is bitwise the same in every run.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "cute_attention/sm90/grad_bias_compute.h"
#include "cute_attention/sm90/grad_bias_load.h"

namespace cute_attention::sm90 {

template <class Row, bool kSums>
struct GradBiasKernel {
  using Traits = GradBiasTraits<Row, kSums>;
  using SharedMemory = typename Traits::SharedMemory;

  // One thread sets the barriers up, with the arrivals that complete a phase.
  CUTE_DEVICE static void init_barriers(SharedMemory& shared) {
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    auto const init = [](auto& full, auto& empty) {
      for (auto& barrier : full) {
        Barrier::init(&barrier, 1);
      }
      for (auto& barrier : empty) {
        Barrier::init(&barrier, kReaders);
      }
    };
    init(shared.visit_full, shared.visit_empty);
    init(shared.m_full, shared.m_empty);
    init(shared.n_full, shared.n_empty);
    Barrier::init(&shared.bias_full, 1);
    Barrier::init(&shared.bias_empty, kReaders);
    Barrier::init(&shared.sum_written, kReaders);
    cutlass::arch::fence_barrier_init();
  }

  CUTE_DEVICE static void run(GradBiasArguments const& arguments, SharedMemory& shared) {
    int const thread = int(threadIdx.x);
    int const warp = warp_uniform(thread / 32);
    if (thread == 0) {
      init_barriers(shared);
    }
    __syncthreads();  // the barriers are there

    if (warp < kWarpgroupWarps) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::Registers::kProducer>();
      if (warp == 0) {
        GradBiasLoad<Row, kSums>(arguments, shared).run();
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::Registers::kConsumer>();
      GradBiasCompute<Row, kSums>(arguments, shared, warp / kWarpgroupWarps - 1,
                                  thread % kWarpgroupThreads)
          .run();
    }
  }
};

}  // namespace cute_attention::sm90
