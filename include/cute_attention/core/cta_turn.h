// core/cta_turn.h: CTAs that add to the same block of global memory one after the other, so that
// the sum is bitwise the same every time.
//
// A counter for each block says how many CTAs have ended their turn. Nobody stands still for an
// atomic's round trip: the counter is read a product before it is needed, and a turn ends a step
// late, when its additions have long been done.
#pragma once

#include <cute/config.hpp>

namespace cute_attention {

// PTX ISA, "ld". Relaxed: nothing but atomics depends on it, and they are issued after the branch.
CUTE_DEVICE int32_t ended_turns(int32_t const* counter) {
  int32_t ended;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(ended) : "l"(counter) : "memory");
  return ended;
}

// Waits for `turn`; `ended` is what ended_turns said before. All threads of a warp call it.
CUTE_DEVICE void await_turn(int32_t const* counter, int32_t turn, int32_t ended) {
  while (ended != turn) {
    ended = ended_turns(counter);
  }
  __syncwarp();
}

// One thread ends the CTA's turn, after a barrier behind the additions of all: a release is
// cumulative, it covers what the barrier has made it see. PTX ISA, "Memory Consistency Model".
CUTE_DEVICE void end_turn(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace cute_attention
