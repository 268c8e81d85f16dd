// emulator/tensor_map.h: what the emulator keeps in the 128 bytes of a CUtensorMap.
#pragma once

#include <cstdint>

namespace cute_attention::emulator {

constexpr uint32_t kMostDimensions = 5;

struct TensorMap {
  uint64_t base;
  uint64_t sizes[kMostDimensions];
  uint64_t strides[kMostDimensions];  // in bytes
  uint16_t box[kMostDimensions];
  uint8_t element_bytes;
  uint8_t dimensions;
  uint8_t swizzle_bytes;

  uint32_t box_bytes() const {
    uint32_t bytes = element_bytes;
    for (uint32_t i = 0; i < dimensions; ++i) bytes *= box[i];
    return bytes;
  }
};
static_assert(sizeof(TensorMap) <= 128);

// Has the signature of cuTensorMapEncodeTiled and refuses what that refuses, as far as this project
// can meet it. Returns 0, or 1 (CUDA_ERROR_INVALID_VALUE).
int encode_tensor_map(void* map, int type, uint32_t dimensions, void* base, uint64_t const* sizes,
                      uint64_t const* strides, uint32_t const* box, uint32_t const* element_strides,
                      int interleave, int swizzle, int l2_promotion, int fill);

}  // namespace cute_attention::emulator
