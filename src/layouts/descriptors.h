// descriptors.h: writes the descriptors as JSON by which WGMMA finds its operands in shared memory.
#pragma once

#include "layouts/describe.h"

namespace cute_attention::layouts {

// The first kGroups groups of a layout (ROWS, COLS, GROUP), one below the other: (ROWS x GROUP,
// COLS).
template <class LinearLayout, int kGroups>
using GroupedRows = decltype(cute::make_layout(
    cute::make_layout(
        cute::get<0>(LinearLayout{}),
        cute::composition(cute::get<2>(LinearLayout{}), cute::Layout<cute::Int<kGroups>>{})),
    cute::get<1>(LinearLayout{})));

template <class Layout, int kGroups>
struct RowsOfGroupsOf;
template <class Swizzle, class Offset, class LinearLayout, int kGroups>
struct RowsOfGroupsOf<cute::ComposedLayout<Swizzle, Offset, LinearLayout>, kGroups> {
  using type = cute::ComposedLayout<Swizzle, Offset, GroupedRows<LinearLayout, kGroups>>;
};
template <class Shape, class Stride, int kGroups>
struct RowsOfGroupsOf<cute::Layout<Shape, Stride>, kGroups> {
  using type = GroupedRows<cute::Layout<Shape, Stride>, kGroups>;
};
template <class Layout, int kGroups>
using RowsOfGroups = typename RowsOfGroupsOf<Layout, kGroups>::type;

// The number of bytes after which a swizzle repeats. The address of a buffer must be a multiple of
// it.
template <class Layout>
constexpr int swizzle_alignment() {
  return Swizzled<Layout>::kBits == 0 ? 128 : 128 << Swizzled<Layout>::kBits;
}

// The descriptors (MMA, MMA_MN, MMA_K, GROUP) of an operand whose tensor begins at address 0. PTX
// ISA, "Matrix Descriptor Format". The addresses in `starts` count elements of 16 bits.
template <class Descriptors>
Json descriptors_json(char const* tensor, bool transposed, char const* major, int rows, int groups,
                      Descriptors const& descriptors) {
  using namespace cute;
  auto const fields = [](auto const& descriptor) { return descriptor.bitfield; };
  auto const first = fields(*descriptors.data());
  int const swizzle_bits = first.layout_type_ == 0 ? 0 : 4 - first.layout_type_;
  Json starts = Json::array();
  for (int group = 0; group < groups; ++group) {
    Json of_group = Json::array();
    for (int rest = 0; rest < size<1>(descriptors); ++rest) {
      Json blocks = Json::array();
      for (int k = 0; k < size<2>(descriptors); ++k) {
        auto const descriptor =
            fields(*(descriptors.data() + descriptors.layout()(0, rest, k, group)));
        blocks.add(int(descriptor.start_address_) * 8);
      }
      of_group.add(blocks);
    }
    starts.add(of_group);
  }
  return Json::object()
      .set("from", "descriptors")
      .set("tensor", tensor)
      .set("transposed", transposed)
      .set("major", major)
      .set("rows", rows)
      .set("swizzle_bits", swizzle_bits)
      .set("leading_bytes", int(first.leading_byte_offset_) * 16)
      .set("stride_bytes", int(first.stride_byte_offset_) * 16)
      .set("starts", starts);
}

}  // namespace cute_attention::layouts
