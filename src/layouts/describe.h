// describe.h: shared-memory tensors, tiled copies and tiled MMAs as JSON, partitioned by CuTe
// itself.
//
// A tile of R x C elements is followed by numbers: element (r, c) is r + R c. `partition` says
// which of them each thread has: base of the thread + layout of (value, ...).
#pragma once

#include <cute/tensor.hpp>  // before the atoms

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

#include "cute_attention/config.h"
#include "layouts/layout_json.h"

namespace cute_attention::layouts {

constexpr int kBankRow = 128;       // bytes: one word of each bank
constexpr int kMaxRegisters = 255;  // of a thread

// What an instruction is called, and how many elements a thread gives it an address for.
template <class CopyAtom>
struct Instruction;
template <class Operation, class... Arguments>
struct Instruction<cute::Copy_Traits<Operation, Arguments...>> : Instruction<Operation> {};
template <class Vector>
struct Instruction<cute::UniversalCopy<Vector>> {
  static constexpr char const* kName = "vector";
};
template <class Vector>
struct Instruction<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Vector>> {
  static constexpr char const* kName = "cp.async";
};
template <class Vector>
struct Instruction<cute::SM80_CP_ASYNC_CACHEGLOBAL<Vector>> {
  static constexpr char const* kName = "cp.async";
};

template <int kRows, int kCols>
using Numbers = cute::Layout<cute::Shape<cute::Int<kRows>, cute::Int<kCols>>>;

// Element numbers of a tile with the shape of a layout.
template <class Layout>
using NumbersOf =
    decltype(cute::make_layout(cute::make_shape(cute::size<0>(Layout{}), cute::size<1>(Layout{}))));

// (THREAD, (VALUES, INSTRUCTIONS), (REST_ROWS, REST_COLS)) of a tiled copy: the elements of a tile
// that each instruction reads, and those that it writes.
template <class TiledCopy, class Numbers>
Json source_json() {
  return layout_json<decltype(TiledCopy::tidfrg_S(Numbers{}))>();
}
template <class TiledCopy, class Numbers>
Json target_json() {
  if constexpr (std::is_same_v<typename TiledCopy::AtomLayoutSrc,
                               typename TiledCopy::AtomLayoutDst>) {
    return source_json<TiledCopy, Numbers>();
  } else {
    return layout_json<decltype(TiledCopy::tidfrg_D(Numbers{}))>();
  }
}

// A tensor in shared memory, or its transpose: a view of the buffer that `tensor` was loaded into.
template <class Layout>
Json smem_json(char const* tensor, bool transposed = false) {
  return Json::object()
      .set("tensor", tensor)
      .set("transposed", transposed)
      .set("swizzle", Swizzled<Layout>::swizzle())
      .set("layout", layout_json<Linear<Layout>>());
}

// A tile between global and shared memory, element for element.
template <class TiledCopy, class Smem>
Json tile_copy_json(char const* tensor, bool load) {
  using Numbers = NumbersOf<Smem>;
  return Json::object()
      .set("instruction", Instruction<typename TiledCopy::Traits>::kName)
      .set("values", int(TiledCopy::NumValSrc))
      .set("tensor", tensor)
      .set("kind", load ? "load" : "store")
      .set("source", source_json<TiledCopy, Numbers>())
      .set("target", target_json<TiledCopy, Numbers>())
      .set("smem", smem_json<Smem>(tensor));
}

// kCols columns of a tile, as local_tile cuts them.
template <class LinearLayout, int kCols>
struct LinearColumns {
  using Divided = decltype(cute::zipped_divide(
      LinearLayout{}, cute::make_shape(cute::size<0>(LinearLayout{}), cute::Int<kCols>{})));
  using Layout = decltype(cute::get<0>(Divided{}));
  static int offset(int index) { return int(cute::get<1>(Divided{})(cute::make_coord(0, index))); }
};
template <class Smem, int kCols>
struct ColumnsOf : LinearColumns<Smem, kCols> {};
template <class Swizzle, class Offset, class LinearLayout, int kCols>
struct ColumnsOf<cute::ComposedLayout<Swizzle, Offset, LinearLayout>, kCols>
    : LinearColumns<LinearLayout, kCols> {
  using Layout =
      cute::ComposedLayout<Swizzle, Offset, typename LinearColumns<LinearLayout, kCols>::Layout>;
};

// Threads of a tiled MMA as (V, M, N, K), and a tile's elements as ((V, (M, K)), (VALUES, (REST_M,
// REST_K))) of them.
template <class TiledMma, class Partition>
Json mma_partition_json() {
  return Json::object()
      .set("threads", layout_json<typename TiledMma::ThrLayoutVMNK>())
      .set("layout", layout_json<Partition>());
}

// An accumulator of 32-bit pairs of 16-bit elements written to the same places of a tile in shared
// memory.
template <class TiledMma, class Smem, class Fragment>
Json fragment_store_json(char const* tensor, char const* accumulator) {
  return Json::object()
      .set("instruction", "vector")
      .set("tensor", tensor)
      .set("kind", "fragment")
      .set("accumulator", accumulator)
      .set("registers", layout_json<Fragment>())
      .set("target",
           mma_partition_json<TiledMma, decltype(TiledMma{}.thrfrg_C(NumbersOf<Smem>{}))>())
      .set("smem", smem_json<Smem>(tensor));
}

// A number in shared memory for each column of an accumulator, of 32 bits, read where the MMA has
// the column. `Layout` (ROWS, COLS) has the same number in all rows.
template <class Layout>
Json row_numbers_json(char const* tensor, char const* accumulator) {
  return Json::object()
      .set("kind", "numbers")
      .set("tensor", tensor)
      .set("accumulator", accumulator)
      .set("layout", layout_json<Layout>());
}

template <class TiledMma, int kM, int kN>
using AccumulatorLayout = typename decltype(cute::partition_fragment_C(
    TiledMma{}, cute::Shape<cute::Int<kM>, cute::Int<kN>>{}))::layout_type;

// The accumulator of a tile of kM x kN: which element each register is.
template <class TiledMma, int kM, int kN>
Json accumulator_json() {
  return Json::object()
      .set("registers", layout_json<AccumulatorLayout<TiledMma, kM, kN>>())
      .set("expected",
           mma_partition_json<TiledMma, decltype(TiledMma{}.thrfrg_C(Numbers<kM, kN>{}))>());
}

// An operand that is an accumulator of before, seen through a layout (MMA, MMA_M, MMA_K).
template <class Layout>
Json register_operand_json(char const* accumulator) {
  return Json::object()
      .set("from", "registers")
      .set("accumulator", accumulator)
      .set("fragment", layout_json<Layout>());
}

// C = A B of a tile of m x n x k, the rows shared out among `warpgroups` that each see the rows of
// their own.
inline Json product_json(char const* name, char const* formula, char const* instruction, int m,
                         int n, int k, Json const& a, Json const& b, Json const& c,
                         int warpgroups = 1) {
  return Json::object()
      .set("name", name)
      .set("formula", formula)
      .set("instruction", instruction)
      .set("tile", Json::array().add(m).add(n).add(k))
      .set("warpgroups", warpgroups)
      .set("a", a)
      .set("b", b)
      .set("c", c);
}

// A buffer of the shared-memory plan. It is alive from phase `first` to phase `last`, both
// included; `alignment` is what its readers need, in bytes.
inline Json buffer_json(char const* name, int offset, int bytes, int alignment, int first,
                        int last) {
  return Json::object()
      .set("name", name)
      .set("offset", offset)
      .set("bytes", bytes)
      .set("needs_alignment", alignment)
      .set("first", first)
      .set("last", last);
}
// A member of the plan.
template <class SharedMemory, class Member>
Json buffer_json(char const* name, SharedMemory const& plan, Member const& member, int alignment,
                 int first, int last) {
  auto const offset = reinterpret_cast<char const*>(&member) - reinterpret_cast<char const*>(&plan);
  return buffer_json(name, int(offset), int(sizeof(member)), alignment, first, last);
}

// Threads that do the same work. `together`: accumulators alive at once, the one being computed
// last. `fixed`: setmaxnreg gives them this number of registers.
inline Json role_json(char const* name, int threads, int registers, bool fixed,
                      Json const& together) {
  return Json::object()
      .set("name", name)
      .set("threads", threads)
      .set("registers", registers)
      .set("fixed", fixed)
      .set("together", together);
}

}  // namespace cute_attention::layouts
