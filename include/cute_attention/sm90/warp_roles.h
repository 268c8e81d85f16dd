// sm90/warp_roles.h: the frame of the kernels: one thread sets the barriers up, and then each warp
// plays its role with the registers that the role needs.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_desc.hpp>

#include "cute_attention/core/load_sequence.h"
#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/warpgroup.h"

namespace cute_attention::sm90 {

template <class... Maps>
CUTE_DEVICE void prefetch_maps(Maps const&... maps) {
  (cute::prefetch_tma_descriptor(&maps), ...);
}

// Sets up the barriers of buffers, with the arrivals that complete a phase: `full` of those who
// write a buffer, `empty` of those who have read it.
template <int kBuffers>
CUTE_DEVICE void init_barriers(uint64_t (&full)[kBuffers], int writers, uint64_t (&empty)[kBuffers],
                               int readers) {
  for (int buffer = 0; buffer < kBuffers; ++buffer) {
    Barrier::init(&full[buffer], writers);
    Barrier::init(&empty[buffer], readers);
  }
}
CUTE_DEVICE void init_barriers(uint64_t& full, int writers, uint64_t& empty, int readers) {
  Barrier::init(&full, writers);
  Barrier::init(&empty, readers);
}

// Runs a kernel of one producer warpgroup and several consumer warpgroups. All threads of the CTA
// call it. The functions of `Kernel`, all of (arguments, shared, ...):
//   set_up()            prefetches tensor maps and sets barriers up; called by one thread
//   produce(warp)       what a warp of the producer does
//   consume(warpgroup)  what a warpgroup of the consumers does
// kWarpAnew: whether each role computes the number of its warp anew. Otherwise it is computed once,
// and takes a register meanwhile.
template <class Kernel, bool kWarpAnew = false, class Arguments, class SharedMemory>
CUTE_DEVICE void play_roles(Arguments const& arguments, SharedMemory& shared) {
  using Registers = typename Kernel::Traits::Registers;
  int const known = kWarpAnew ? 0 : warp_of_cta();
  auto const warp = [&] { return kWarpAnew ? warp_of_cta() : known; };
  if (threadIdx.x == 0) {
    Kernel::set_up(arguments, shared);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();  // the barriers are there

  if (warp() < kWarpgroupWarps) {
    cutlass::arch::warpgroup_reg_dealloc<Registers::kProducer>();
    Kernel::produce(arguments, shared, warp());
  } else {
    cutlass::arch::warpgroup_reg_alloc<Registers::kConsumer>();
    Kernel::consume(arguments, shared, warp() / kWarpgroupWarps - 1);
  }
}

}  // namespace cute_attention::sm90
