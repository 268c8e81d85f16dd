// sm80/swizzled_layout.h: a layout in shared memory, taken apart.
#pragma once

#include <cute/tensor.hpp>

namespace cute_attention::sm80 {

// A layout as its part that is linear in the coordinates and the swizzle of what that gives, if
// there is one. The backward kernel, which partitions the linear parts, compiles in three quarters
// of the time that it takes with the whole layouts.
template <class Layout>
struct SwizzledLayout {
  using Linear = Layout;
  CUTE_HOST_DEVICE static constexpr uint32_t swizzle(uint32_t offset) { return offset; }
};
template <class Swizzle, class LinearPart>
struct SwizzledLayout<cute::ComposedLayout<Swizzle, cute::_0, LinearPart>> {
  using Linear = LinearPart;
  CUTE_HOST_DEVICE static constexpr uint32_t swizzle(uint32_t offset) {
    return Swizzle::apply(offset);
  }
};

}  // namespace cute_attention::sm80
