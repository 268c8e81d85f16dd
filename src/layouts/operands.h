// operands.h: writes the addresses as JSON that threads pass to ldmatrix, to stores of accumulators
// and to copies of tiles. The code of the kernels itself computes them here.
#pragma once

#include <vector>

#include "layouts/describe.h"

#include "cute_attention/sm80/smem_operand.h"
#include "cute_attention/sm80/tile_walk.h"

namespace cute_attention::layouts {

// The template arguments of an sm80::SmemOperand.
template <class Copy, class Layout, int kElements, bool kIsTransposed, int kCols>
struct OperandParts {
  using TiledCopy = Copy;
  using SmemLayout = Layout;
  static constexpr bool kTransposed = kIsTransposed;
  static constexpr int kK = kCols;
};
template <class Copy, class Layout, int kElements, bool kTransposed, int kK>
OperandParts<Copy, Layout, kElements, kTransposed, kK> operand_parts(
    sm80::SmemOperand<Copy, Layout, kElements, kTransposed, kK> const*);
template <class Operand>
using PartsOf = decltype(operand_parts(static_cast<Operand const*>(nullptr)));

// The layout of the fragment (MMA, MMA_MN, MMA_K) that a kernel makes for the operand A or B of an
// MMA.
struct OperandA {
  template <class TiledMma, class Tensor>
  using Fragment = typename decltype(TiledMma{}.get_slice(0).partition_fragment_A(
      std::declval<Tensor>()))::layout_type;
};
struct OperandB {
  template <class TiledMma, class Tensor>
  using Fragment = typename decltype(TiledMma{}.get_slice(0).partition_fragment_B(
      std::declval<Tensor>()))::layout_type;
};

// Appends nested static integers to a list.
template <class IntTuple>
struct Flat {
  static void append(std::vector<int>& list) { list.push_back(IntTuple::value); }
};
template <class... Elements>
struct Flat<cute::tuple<Elements...>> {
  static void append(std::vector<int>& list) { (Flat<Elements>::append(list), ...); }
};

// The offsets of all elements of a mode. Of nested modes the first one runs fastest.
inline std::vector<int> mode_offsets(std::vector<int> const& shape,
                                     std::vector<int> const& stride) {
  std::vector<int> offsets{0};
  for (size_t mode = 0; mode < shape.size(); ++mode) {
    size_t const before = offsets.size();
    for (int i = 1; i < shape[mode]; ++i) {
      for (size_t j = 0; j < before; ++j) {
        offsets.push_back(offsets[j] + i * stride[mode]);
      }
    }
  }
  return offsets;
}
template <int... kMode, class Shape, class Stride>
std::vector<int> mode_offsets(cute::Layout<Shape, Stride> const&) {
  using Mode = decltype(cute::layout<kMode...>(cute::Layout<Shape, Stride>{}));
  std::vector<int> shape, stride;
  Flat<decltype(Mode{}.shape())>::append(shape);
  Flat<decltype(Mode{}.stride())>::append(stride);
  return mode_offsets(shape, stride);
}

// The addresses that each thread passes to ldmatrix, in bytes from the start of the buffer. CuTe
// says where the first vector of each thread lies, in the operand `First`, and how far each vector
// of thread 0 is from its first one. From these the code of the operand computes the address of
// every vector. `starts` says for each warp how many bytes from the buffer its tile begins.
template <class Operand, class First>
Json addresses_json(std::vector<int> const& starts) {
  using Parts = PartsOf<Operand>;
  using Smem = Swizzled<typename Parts::SmemLayout>;
  using SmemFirst = Swizzled<typename PartsOf<First>::SmemLayout>;
  constexpr int kBytes = Operand::kElementBytes;
  constexpr int kCols = decltype(cute::size<1>(typename Parts::SmemLayout{}))::value;
  decltype(Parts::TiledCopy::tidfrg_S(typename Smem::Linear{})) const layout;
  auto const threads = mode_offsets<0>(
      decltype(PartsOf<First>::TiledCopy::tidfrg_S(typename SmemFirst::Linear{})){});
  auto const values = mode_offsets<1>(layout);
  auto const rests = mode_offsets<2>(layout);
  Json addresses = Json::array();
  for (size_t thread = 0; thread < threads.size(); ++thread) {
    int const first = kBytes * SmemFirst::apply(threads[thread]);
    Operand const operand(uint32_t(first + starts[thread / 32 % starts.size()]), 0);
    Json own = Json::array();
    for (size_t rest = 0; rest < rests.size() * Parts::kK / kCols; ++rest) {
      for (size_t value = 0; value < values.size(); value += kMatrixRow) {
        int const offset = kBytes * Smem::apply(values[value] + rests[rest]);
        own.add(int(operand.block_address(uint32_t(offset))));
      }
    }
    addresses.add(own);
  }
  return addresses;
}

// An operand that ldmatrix loads from shared memory into the fragment of an MMA.
//   View    the part of the tensor's tile that is the operand, as CuTe cuts the tile
//   cuts    for each warp the element at which its part begins, according to CuTe
//   starts  for each warp the byte at which its part begins, according to the kernel
//   First   the operand whose first addresses this one uses, too
template <class Operand, class Side, class TiledMma, class First = Operand,
          class View = typename PartsOf<Operand>::SmemLayout>
Json smem_operand_json(char const* tensor, std::vector<int> const& cuts = {0},
                       std::vector<int> const& starts = {0}) {
  using Parts = PartsOf<Operand>;
  using Fragment = typename Side::template Fragment<TiledMma, decltype(Operand::shape_tensor())>;
  return Json::object()
      .set("from", "shared")
      .set("instruction", Parts::kTransposed ? "ldmatrix.x4.trans" : "ldmatrix.x4")
      .set("values", kMatrixRow)
      .set("address", source_json<typename Parts::TiledCopy, Linear<View>>())
      .set("smem", smem_json<View>(tensor, Parts::kTransposed))
      .set("warp_offsets", json_array(cuts))
      .set("given", addresses_json<Operand, First>(starts))
      .set("registers", layout_json<decltype(Parts::TiledCopy::retile(Fragment{}))>())
      .set("fragment", layout_json<Fragment>());
}

// The addresses to which each thread writes the pairs of an accumulator, in bytes from the start of
// the buffer. The code of `Place` computes them, an sm80::SmemAccumulator of TiledMma and Smem. For
// each pair of an MMA come its addresses in all (MMA_M, MMA_N), the last mode fastest.
template <class Place, class TiledMma, class Smem>
Json pair_addresses_json() {
  constexpr int kBytes = Place::kElementBytes;
  decltype(TiledMma{}.thrfrg_C(Linear<Smem>{})) const layout;
  auto const threads = mode_offsets<>(typename TiledMma::ThrLayoutVMNK{});
  auto const firsts = mode_offsets<0>(layout);
  auto const values = mode_offsets<1, 0>(layout);
  auto const blocks_m = mode_offsets<1, 1, 0>(layout);
  auto const blocks_n = mode_offsets<1, 1, 1>(layout);
  std::vector<Json> addresses(threads.size(), Json::array());
  for (size_t i = 0; i < threads.size(); ++i) {
    Place const place(uint32_t(kBytes * Swizzled<Smem>::apply(firsts[i])));
    Json own = Json::array();
    for (size_t pair = 0; pair < values.size(); pair += 2) {
      for (int const m : blocks_m) {
        for (int const n : blocks_n) {
          int const offset = kBytes * Swizzled<Smem>::apply(values[pair] + m + n);
          own.add(int(place.block_address(uint32_t(offset))));
        }
      }
    }
    addresses[threads[i]] = own;
  }
  return json_array(addresses);
}

// The copy of a tile that an sm80::TileWalk loads. For each thread it says to which addresses its
// vectors go, in bytes from the start of the buffer, and with which element of the tile each vector
// begins. CuTe says where the first vector of a thread lies; the code of the walk computes the
// rest.
template <class TiledCopy, class Smem>
Json walked_copy_json(char const* tensor) {
  using Walk = sm80::TileWalk<TiledCopy, Smem>;
  using Numbers = NumbersOf<Smem>;
  constexpr int kBytes = sizeof(typename Walk::Element);
  auto const targets = mode_offsets<0>(decltype(TiledCopy::tidfrg_D(Linear<Smem>{})){});
  auto const sources = mode_offsets<0>(decltype(TiledCopy::tidfrg_S(Numbers{})){});
  Json given = Json::array();
  Json given_source = Json::array();
  for (size_t thread = 0; thread < targets.size(); ++thread) {
    Json places = Json::array();
    Json elements = Json::array();
    for (int step = 0; step < Walk::kSteps; ++step) {
      for (int pass = 0; pass < Walk::kPasses; ++pass) {
        places.add(kBytes * Swizzled<Smem>::apply(targets[thread]) + int(Walk::offset(pass, step)));
        elements.add(sources[thread] + Walk::row(pass) + Walk::kRows * Walk::col(step));
      }
    }
    given.add(places);
    given_source.add(elements);
  }
  return tile_copy_json<TiledCopy, Smem>(tensor, true)
      .set("given", given)
      .set("given_source", given_source);
}

// An accumulator that a kernel writes to shared memory, with the addresses that `Place` computes.
template <class Place, class TiledMma, class Smem, class Fragment>
Json placed_fragment_json(char const* tensor, char const* accumulator) {
  return fragment_store_json<TiledMma, Smem, Fragment>(tensor, accumulator)
      .set("given", pair_addresses_json<Place, TiledMma, Smem>());
}

}  // namespace cute_attention::layouts
