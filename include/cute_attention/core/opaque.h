// core/opaque.h: keeps cheap arithmetic inside a loop.
#pragma once

#include <cute/config.hpp>

namespace cute_attention {

// Returns `value`, but the compiler cannot know that it is the same one. So what is computed from
// an opaque thread index inside the loop over KV tiles is computed there, and not before the loop.
// Computed before it, the addresses of swizzled blocks, global rows and mask coordinates would
// occupy some 30 registers during the whole loop, and kernels whose accumulators need 192 would
// spill.
CUTE_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
CUTE_DEVICE uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
CUTE_DEVICE int64_t opaque(int64_t value) {
  asm volatile("" : "+l"(value));
  return value;
}
template <class T>
CUTE_DEVICE T* opaque(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// `value`, in a register for as long as it is used. ptxas sees through opaque(), and where
// registers are few it computes a value anew at each use, instruction by instruction; the result of
// a shuffle it cannot. All threads of a warp call it together.
CUTE_DEVICE uint32_t pinned(uint32_t value) { return __shfl_xor_sync(0xffffffffu, value, 0); }
template <class T>
CUTE_DEVICE T* pinned(T* pointer) {
  return reinterpret_cast<T*>(
      __shfl_xor_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pointer), 0));
}

}  // namespace cute_attention
