#include "emulator/tensor_map.h"

#include <cstring>
#include <iterator>

namespace cute_attention::emulator {

int encode_tensor_map(void* map, int type, uint32_t dimensions, void* base, uint64_t const* sizes,
                      uint64_t const* strides, uint32_t const* box, uint32_t const* element_strides,
                      int interleave, int swizzle, int, int fill) {
  constexpr int kInvalid = 1;
  static constexpr uint8_t kElementBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};  // by type
  static constexpr uint8_t kSwizzleBytes[] = {0, 32, 64, 128};
  TensorMap result = {};
  bool const is_known = type >= 0 && type < static_cast<int>(std::size(kElementBytes)) &&
                        dimensions >= 1 && dimensions <= kMostDimensions && interleave == 0 &&
                        swizzle >= 0 && swizzle <= 3 && fill == 0;
  if (!is_known) return kInvalid;
  result.base = reinterpret_cast<uint64_t>(base);
  result.element_bytes = kElementBytes[type];
  result.dimensions = static_cast<uint8_t>(dimensions);
  result.swizzle_bytes = kSwizzleBytes[swizzle];
  if (result.base % 16 != 0 || reinterpret_cast<uint64_t>(map) % 64 != 0) return kInvalid;
  for (uint32_t i = 0; i < dimensions; ++i) {
    bool const is_valid = sizes[i] >= 1 && sizes[i] <= uint64_t(1) << 32 && box[i] >= 1 &&
                          box[i] <= 256 && element_strides[i] == 1;
    if (!is_valid) return kInvalid;
    result.sizes[i] = sizes[i];
    result.box[i] = static_cast<uint16_t>(box[i]);
    result.strides[i] = i == 0 ? result.element_bytes : strides[i - 1];
    if (i > 0 && (result.strides[i] % 16 != 0 || result.strides[i] >= uint64_t(1) << 40)) {
      return kInvalid;
    }
  }
  uint32_t const inner = uint32_t(result.box[0]) * result.element_bytes;
  if (inner % 16 != 0 || (result.swizzle_bytes != 0 && inner > result.swizzle_bytes)) {
    return kInvalid;
  }
  std::memset(map, 0, 128);
  std::memcpy(map, &result, sizeof(result));
  return 0;
}

}  // namespace cute_attention::emulator
