// json.h: integers, text and CuTe layouts as JSON.
#pragma once

#include <cute/tensor.hpp>

#include <string>
#include <type_traits>
#include <vector>

namespace cute_attention::layouts {

inline std::string quoted(std::string const& text) { return '"' + text + '"'; }

// A JSON object or array, as text. Values are JSON already, but for integers.
class Json {
 public:
  explicit Json(char const* brackets) : close_(1, brackets[1]), text_(1, brackets[0]) {}

  template <class Value>
  Json& add(Value const& value) {
    text_ += text_.size() > 1 ? "," : "";
    if constexpr (std::is_arithmetic_v<Value>) {
      text_ += std::to_string(value);
    } else {
      text_ += value;
    }
    return *this;
  }

  template <class Value>
  Json& set(char const* key, Value const& value) {
    add(quoted(key) + ":");
    if constexpr (std::is_arithmetic_v<Value>) {
      text_ += std::to_string(value);
    } else {
      text_ += value;
    }
    return *this;
  }

  operator std::string() const { return text_ + close_; }

 private:
  std::string close_;
  std::string text_;
};

inline Json object() { return Json("{}"); }
inline Json array() { return Json("[]"); }
inline std::string list_json(std::vector<int> const& list) {
  Json json = array();
  for (int const item : list) {
    json.add(item);
  }
  return json;
}

// Nested static integers: (2,(4,8)) -> [2,[4,8]]. Types alone, here and below: no code is generated
// for CuTe's algebra.
template <class IntTuple>
struct TupleJson {
  static std::string text() { return std::to_string(IntTuple::value); }
};
template <class... Elements>
struct TupleJson<cute::tuple<Elements...>> {
  static std::string text() {
    Json json = array();
    (json.add(TupleJson<Elements>::text()), ...);
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
  static std::string swizzle() { return "[0,0,0]"; }
  static int apply(int offset) { return offset; }
};
template <int kSwizzleBits, int kBase, int kShift, class LinearPart>
struct Swizzled<
    cute::ComposedLayout<cute::Swizzle<kSwizzleBits, kBase, kShift>, cute::C<0>, LinearPart>> {
  using Linear = LinearPart;
  static constexpr int kBits = kSwizzleBits;
  static std::string swizzle() { return array().add(kBits).add(kBase).add(kShift); }
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
  static std::string text() {
    return object().set("shape", TupleJson<Shape>::text()).set("stride", TupleJson<Stride>::text());
  }
};
template <class Layout>
std::string layout_json() {
  return LayoutJson<Layout>::text();
}

}  // namespace cute_attention::layouts
