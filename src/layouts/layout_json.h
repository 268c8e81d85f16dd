// layout_json.h: CuTe layouts as JSON.
#pragma once

#include <cute/tensor.hpp>

#include <string>

#include "json.h"

namespace cute_attention::layouts {

// Nested static integers: (2,(4,8)) -> [2,[4,8]]. Types alone, here and below: no code is generated
// for CuTe's algebra.
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

// The part of a layout that is linear in the coordinates (all of it, or what a swizzle is applied
// to), and the swizzle as [bits, base, shift]; bits = 0 is none.
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
// CuTe counts a swizzle of pointers in bytes; elements here have two.
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
