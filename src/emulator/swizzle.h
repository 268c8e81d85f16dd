// emulator/swizzle.h: where the hardware's swizzle of 32, 64 or 128 bytes places data in shared
// memory: it exchanges 16-byte units within rows of so many bytes.
#pragma once

#include <cstdint>

namespace cute_attention::emulator {

// `bytes` is 0 without a swizzle.
inline uint32_t swizzled(uint32_t address, uint32_t bytes) {
  uint32_t const units = bytes == 0 ? 0 : bytes / 16 - 1;
  return address ^ (address >> 7 & units) << 4;
}

}  // namespace cute_attention::emulator
