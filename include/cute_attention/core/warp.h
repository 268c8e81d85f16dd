// core/warp.h: what device code asks of its warp.
#pragma once

#include <cute/config.hpp>

namespace cute_attention {

// The number of this thread in its warp. It is read from a register of its own (PTX ISA,
// "%laneid"), so that warps with few registers need not keep threadIdx.
CUTE_DEVICE int32_t lane_of_warp() {
  int32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// The number of this thread in its warp, of this CTA, and of CTAs in the grid, read at each use.
// What the compiler knows to be the same number elsewhere it may read once for all roles of a
// kernel: then it takes a register of roles that have none left.
CUTE_DEVICE int32_t lane_anew() {
  int32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
CUTE_DEVICE int32_t cta_anew() {
  int32_t cta;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  return cta;
}
CUTE_DEVICE int32_t ctas_anew() {
  int32_t ctas;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(ctas));
  return ctas;
}

// The warp of a GPU. Its 32 threads call the functions that exchange something together. Host tests
// put an emulated warp in its place.
struct DeviceWarp {
  // Whether `vote` is true in some thread.
  CUTE_DEVICE static bool any(bool vote) { return __any_sync(0xffffffffu, vote); }
  // The value of the thread whose number differs from this thread's in the bits of `mask`.
  CUTE_DEVICE static float shuffle_xor(float value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
  CUTE_DEVICE static uint32_t shuffle_xor(uint32_t value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
  // The number of thread `thread` in its warp: of the thread that asks.
  CUTE_DEVICE static int lane(int) { return lane_of_warp(); }
  // The largest and the smallest of three, by one instruction from compute capability 9.0 on.
  CUTE_DEVICE static int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }
  CUTE_DEVICE static uint32_t max3_unsigned(uint32_t a, uint32_t b, uint32_t c) {
    return __vimax3_u32(a, b, c);
  }
  CUTE_DEVICE static int min3(int a, int b, int c) { return __vimin3_s32(a, b, c); }
};

}  // namespace cute_attention
