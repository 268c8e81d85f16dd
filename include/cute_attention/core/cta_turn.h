// core/cta_turn.h: lets CTAs add to the same block of global memory in a fixed order, so that the
// sum is bitwise the same every time.
//
// A counter for each block counts the CTAs that have ended their turn. No CTA stands still while an
// atomic is under way: it reads the counter one product before it needs the value, and ends its
// turn one step late, when its additions have long been done.
#pragma once

#include <cute/config.hpp>

namespace cute_attention {

// How many turns have ended. A relaxed load (PTX ISA, "ld") is enough: only atomics depend on its
// value, and they are issued after the branch that tests it.
CUTE_DEVICE int32_t ended_turns(int32_t const* counter) {
  int32_t ended;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(ended) : "l"(counter) : "memory");
  return ended;
}

// Waits until it is turn `turn`; `ended` is what ended_turns() returned before. All threads of a
// warp call it together.
CUTE_DEVICE void await_turn(int32_t const* counter, int32_t turn, int32_t ended) {
  while (ended != turn) {
    ended = ended_turns(counter);
  }
  __syncwarp();
}

// Ends the CTA's turn. One thread calls it, after a barrier that follows the additions of all
// threads. A release is cumulative: it also covers the additions that this thread has seen through
// the barrier. PTX ISA, "Memory Consistency Model".
CUTE_DEVICE void end_turn(int32_t* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace cute_attention
