// descriptors.h: writes the products of WGMMA as JSON, with the descriptors by which it finds its
// operands in shared memory.
#pragma once

#include <string>

#include "layouts/describe.h"

#include "cute_attention/sm90/warpgroup.h"

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

// A tensor whose memory begins at address 0.
template <class Element, class Layout>
auto tensor_at_zero() {
  auto* const memory = reinterpret_cast<Element*>(shared_memory_window);
  return cute::make_tensor(cute::make_smem_ptr(memory), Layout{});
}

// The operand A or B that a product of WGMMAs reads from shared memory. The tensor's memory begins
// at address 0. descriptors(i) are the descriptors (MMA, MMA_MN, MMA_K) of warpgroup i; if `groups`
// is 1, all warpgroups have the same. PTX ISA, "Matrix Descriptor Format". The addresses in
// `starts` count elements of 16 bits.
//   rows  of A or columns of B that one WGMMA reads
template <class DescriptorsOf>
Json descriptors_json(char const* tensor, bool transposed, char const* major, int rows, int groups,
                      DescriptorsOf const& descriptors_of) {
  using namespace cute;
  auto const fields = [](auto const& descriptor) { return descriptor.bitfield; };
  auto const first = fields(*descriptors_of(0).data());
  int const swizzle_bits = first.layout_type_ == 0 ? 0 : 4 - first.layout_type_;
  Json starts = Json::array();
  for (int group = 0; group < groups; ++group) {
    auto const descriptors = descriptors_of(group);
    Json of_group = Json::array();
    for (int rest = 0; rest < size<1>(descriptors); ++rest) {
      Json blocks = Json::array();
      for (int k = 0; k < size<2>(descriptors); ++k) {
        auto const descriptor = fields(*(descriptors.data() + descriptors.layout()(0, rest, k)));
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

// The columns of C that one WGMMA computes.
template <class Mma>
constexpr int kWgmmaN = decltype(cute::size<1>(typename Mma::AtomShape_MNK{}))::value;

// An operand A of which warpgroup i reads tile i of a tensor (ROWS, COLS, WARPGROUP).
template <class Mma, class Tensor>
Json operand_a_of_each_json(char const* name, Tensor const& tensor, int warpgroups) {
  using namespace cute;
  return descriptors_json(name, false, "k", sm90::kWarpgroupM, warpgroups, [&](int warpgroup) {
    return Mma{}.get_slice(0).partition_fragment_A(tensor)(_, _, _, warpgroup);
  });
}

// An operand B that all warpgroups have in common, of a tensor (ROWS, COLS, STAGE).
template <class Mma, class Tensor>
Json operand_b_json(char const* name, bool transposed, Tensor const& tensor) {
  using namespace cute;
  return descriptors_json(name, transposed, transposed ? "mn" : "k", kWgmmaN<Mma>, 1, [&](int) {
    return Mma{}.get_slice(0).partition_fragment_B(tensor)(_, _, _, 0);
  });
}

// Threads of the producer warpgroup, which have no accumulators.
template <class Traits>
Json producer_role_json(char const* name, int threads) {
  return role_json(name, threads, Traits::Registers::kProducer, true, Json::array());
}

// Where the parts of warpgroups begin that have 64 rows each.
inline Json origins_below_each_other(int warpgroups) {
  Json origins = Json::array();
  for (int warpgroup = 0; warpgroup < warpgroups; ++warpgroup) {
    origins.add(origin_json(warpgroup * sm90::kWarpgroupM, 0));
  }
  return origins;
}

// A product that warpgroups compute with WGMMAs.
template <class Mma>
Json wgmma_product_json(char const* name, char const* formula, int m, int n, int k, Json const& a,
                        Json const& b, Json const& c,
                        Json const& origins = json_array({origin_json(0, 0)})) {
  std::string const instruction = "wgmma.m64n" + std::to_string(kWgmmaN<Mma>) + "k16";
  return product_json(name, formula, instruction.c_str(), m, n, k, a, b, c, origins);
}

}  // namespace cute_attention::layouts
