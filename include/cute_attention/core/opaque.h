// core/opaque.h: keeps cheap arithmetic inside a loop.
#pragma once

#include <cute/config.hpp>

namespace cute_attention {

// `value`, behind a wall that the compiler does not look through. What is computed from an opaque
// thread index inside the loop over KV tiles stays there. Hoisted out of it, the addresses of
// swizzled blocks, global rows and mask coordinates take some 30 registers through the whole loop,
// and rows whose accumulators take 192 of them spill.
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

}  // namespace cute_attention
