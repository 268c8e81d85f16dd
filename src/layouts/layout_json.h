// layout_json.h: writes CuTe layouts as JSON.
#pragma once

#include <cute/tensor.hpp>

#include <string>

#include "json.h"

namespace cute_attention::layouts {

// Writes nested static integers: (2,(4,8)) -> [2,[4,8]]. Here and below the integers are part of
// the types, so that the compiler generates no code for CuTe's arithmetic on layouts.
template <class IntTuple>
struct TupleJson {
  static int json() { return IntTuple::value; }
};
template <class... Elements>
struct TupleJson<cute::tuple<Elements...>> {
  static Json json() {
    Json json = Json::array();
    (json.add(TupleJson<Elements>::json()), ...);
    return json;
  }
};

// Splits a layout into its linear part and its swizzle. The linear part maps coordinates to an
// offset, and the swizzle is applied to that offset. The JSON of the swizzle is [bits, base,
// shift], with bits = 0 for a layout without one.
template <class Layout>
struct Swizzled;
template <class Shape, class Stride>
struct Swizzled<cute::Layout<Shape, Stride>> {
  using Linear = cute::Layout<Shape, Stride>;
  static constexpr int kBits = 0;
  static Json swizzle() { return json_array({0, 0, 0}); }
  static int apply(int offset) { return offset; }
};
template <int kSwizzleBits, int kBase, int kShift, class LinearPart>
struct Swizzled<
    cute::ComposedLayout<cute::Swizzle<kSwizzleBits, kBase, kShift>, cute::C<0>, LinearPart>> {
  using Linear = LinearPart;
  static constexpr int kBits = kSwizzleBits;
  static Json swizzle() { return json_array({kBits, kBase, kShift}); }
  static int apply(int offset) { return cute::Swizzle<kSwizzleBits, kBase, kShift>::apply(offset); }
};
// The swizzle of a layout for pointers counts bytes. Elements have two bytes here, so that a base
// in elements is smaller by 1.
template <int kSwizzleBits, int kBase, int kShift, class LinearPart>
struct Swizzled<cute::ComposedLayout<cute::Swizzle<kSwizzleBits, kBase, kShift>,
                                     cute::smem_ptr_flag_bits<16>, LinearPart>>
    : Swizzled<cute::ComposedLayout<cute::Swizzle<kSwizzleBits, kBase - 1, kShift>, cute::C<0>,
                                    LinearPart>> {};
template <class Layout>
using Linear = typename Swizzled<Layout>::Linear;

template <class Layout>
struct LayoutJson;
template <class Shape, class Stride>
struct LayoutJson<cute::Layout<Shape, Stride>> {
  static Json json() {
    return Json::object()
        .set("shape", TupleJson<Shape>::json())
        .set("stride", TupleJson<Stride>::json());
  }
};
template <class Layout>
Json layout_json() {
  return LayoutJson<Layout>::json();
}

}  // namespace cute_attention::layouts
