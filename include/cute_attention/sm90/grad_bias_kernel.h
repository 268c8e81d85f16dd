// sm90/grad_bias_kernel.h: the sm90 kernel that computes the gradient of a bias, after the kernels
// that compute those of q, k and v: a persistent grid of CTAs, each of which takes a run of tiles
// of the gradient, or a part of the visits of a tile, after the other (core/grad_bias_tiles.h). A
// producer warp and two consumer warpgroups.
//
// It computes S and dP anew, two of the backward's five products. Nothing is added in global
// memory, and the gradient is bitwise the same in every run.
#pragma once

#include "cute_attention/sm90/grad_bias_compute.h"
#include "cute_attention/sm90/grad_bias_load.h"
#include "cute_attention/sm90/warp_roles.h"

namespace cute_attention::sm90 {

template <class Row, bool kSums>
struct GradBiasKernel {
  using Traits = GradBiasTraits<Row, kSums>;
  using SharedMemory = typename Traits::SharedMemory;

  // The roles of the CTA (warp_roles.h).
  CUTE_DEVICE static void set_up(GradBiasArguments const&, SharedMemory& shared) {
    constexpr int kReaders = Traits::kConsumers * kWarpgroupWarps;
    init_barriers(shared.visit_full, 1, shared.visit_empty, kReaders);
    init_barriers(shared.m_full, 1, shared.m_empty, kReaders);
    init_barriers(shared.n_full, 1, shared.n_empty, kReaders);
    init_barriers(shared.bias_full, 1, shared.bias_empty, kReaders);
    Barrier::init(&shared.sum_written, kReaders);
  }

  CUTE_DEVICE static void produce(GradBiasArguments const& arguments, SharedMemory& shared,
                                  int warp) {
    if (warp == 0) {
      GradBiasLoad<Row, kSums>(arguments, shared).run();
    }
  }

  CUTE_DEVICE static void consume(GradBiasArguments const& arguments, SharedMemory& shared,
                                  int warpgroup) {
    GradBiasCompute<Row, kSums>(arguments, shared, warpgroup, int(threadIdx.x) % kWarpgroupThreads)
        .run();
  }

  CUTE_DEVICE static void run(GradBiasArguments const& arguments, SharedMemory& shared) {
    play_roles<GradBiasKernel>(arguments, shared);
  }
};

}  // namespace cute_attention::sm90
