// core/opaque.h: tells the compiler whether to compute a value at each use, or to keep it in a
// register.
#pragma once

#include <cute/config.hpp>

namespace cute_attention {

// Returns `value`, but in such a way that the compiler cannot know that the result is the same
// number. What is computed from an opaque thread index inside the loop over KV tiles therefore
// stays inside the loop. Otherwise the compiler would compute the addresses of swizzled blocks, the
// addresses of global rows and the coordinates for the mask before the loop. They would occupy
// about 30 registers during the whole loop, and kernels whose accumulators need 192 registers would
// spill.
CUTE_DEVICE int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
CUTE_DEVICE uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
CUTE_DEVICE float opaque(float value) {
  asm volatile("" : "+r"(reinterpret_cast<int&>(value)));
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

// Returns `value` in a register, where it stays until its last use. ptxas sees through opaque():
// where registers are scarce, it repeats the instructions that compute a value at each use. It
// cannot repeat a shuffle, so the result of one stays in its register. All threads of a warp call
// it together.
CUTE_DEVICE uint32_t pinned(uint32_t value) { return __shfl_xor_sync(0xffffffffu, value, 0); }
template <class T>
CUTE_DEVICE T* pinned(T* pointer) {
  return reinterpret_cast<T*>(
      __shfl_xor_sync(0xffffffffu, reinterpret_cast<unsigned long long>(pointer), 0));
}

// Returns 0, as soon as `probability` is computed: a probability has no sign. An address to which
// it is added cannot be known sooner.
CUTE_DEVICE uint32_t zero_after(float probability) {
  return reinterpret_cast<uint32_t const&>(probability) >> 31;
}

}  // namespace cute_attention
