// describe.h: writes shared-memory tensors, tiled copies and tiled MMAs as JSON. CuTe itself
// divides the tiles among the threads.
//
// The elements of a tile of R x C are numbered: element (r, c) has the number r + R c. The layout
// of a copy or an MMA says which numbers each thread has. It maps a thread, a value of the thread
// and a repetition of the instruction to a number.
#pragma once

#include <cute/tensor.hpp>  // before the atoms

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

#include "cute_attention/config.h"
#include "cute_attention/core/accumulator.h"
#include "layouts/kernels.h"
#include "layouts/layout_json.h"

namespace cute_attention::layouts {

constexpr int kBankRow = 128;       // bytes of a row of banks, which has one word of each bank
constexpr int kMaxRegisters = 255;  // the most registers of a thread
// ldmatrix and stmatrix take from a thread the address of so many elements, a row of a matrix.
constexpr int kMatrixRow = 8;

// The name of the instruction that a copy uses.
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
template <>
struct Instruction<cute::SM90_U32x4_STSM_N> {
  static constexpr char const* kName = "stmatrix.x4";
};
template <>
struct Instruction<cute::SM90_U16x8_STSM_T> {
  static constexpr char const* kName = "stmatrix.x4.trans";
};

template <int kRows, int kCols>
using Numbers = cute::Layout<cute::Shape<cute::Int<kRows>, cute::Int<kCols>>>;

// The element numbers of a tile that has the shape of a layout.
template <class Layout>
using NumbersOf =
    decltype(cute::make_layout(cute::make_shape(cute::size<0>(Layout{}), cute::size<1>(Layout{}))));

// The elements of a tile that each instruction of a tiled copy reads, and those that it writes.
// Both are layouts (THREAD, (VALUES, INSTRUCTIONS), (REST_ROWS, REST_COLS)).
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

// A view of the buffer in shared memory that holds `tensor`: the tensor itself, or its transpose.
template <class Layout>
Json smem_json(char const* tensor, bool transposed = false) {
  return Json::object()
      .set("tensor", tensor)
      .set("transposed", transposed)
      .set("swizzle", Swizzled<Layout>::swizzle())
      .set("layout", layout_json<Linear<Layout>>());
}

// A tiled copy of a tile between global and shared memory. `load` says in which direction.
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

// A part of a tile: kCols of its columns, as CuTe's local_tile cuts them. offset(i) says where part
// i begins.
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

// Which elements of a tile each thread of a tiled MMA has. `threads` maps (V, M, N, K) to a thread.
// `layout` maps ((V, (M, K)), (VALUES, (REST_M, REST_K))) to the number of an element; its first
// mode is the thread by these coordinates, its second mode a value of that thread.
template <class TiledMma, class Partition>
Json mma_partition_json() {
  return Json::object()
      .set("threads", layout_json<typename TiledMma::ThrLayoutVMNK>())
      .set("layout", layout_json<Partition>());
}

// An accumulator that is rounded to 16 bits and written to a tile in shared memory, each element to
// its own place in the tile. A thread writes two neighbouring elements as one word of 32 bits.
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

// An accumulator that is rounded to 16 bits and written to a tile in shared memory by stmatrix. The
// target of a thread is the row of a matrix whose address it passes; its registers are those that
// it passes.
template <class TiledCopy, class Smem, class Fragment>
Json matrix_store_json(char const* tensor, char const* accumulator) {
  return Json::object()
      .set("instruction", Instruction<typename TiledCopy::Traits>::kName)
      .set("values", kMatrixRow)
      .set("tensor", tensor)
      .set("kind", "matrices")
      .set("accumulator", accumulator)
      .set("registers", layout_json<decltype(TiledCopy::retile(Fragment{}))>())
      .set("target", target_json<TiledCopy, NumbersOf<Smem>>())
      .set("smem", smem_json<Smem>(tensor));
}

// Numbers of 32 bits in shared memory, one for each column of an accumulator. A thread reads those
// of the columns that it has in the accumulator `partition`, which has to have the same layout.
// `Layout` (ROWS, COLS) gives all rows of a column the same number.
template <class Layout>
Json row_numbers_json(char const* tensor, char const* accumulator, char const* partition) {
  return Json::object()
      .set("kind", "numbers")
      .set("tensor", tensor)
      .set("accumulator", accumulator)
      .set("partition", partition)
      .set("layout", layout_json<Layout>());
}

template <class TiledMma, int kM, int kN>
using AccumulatorLayout = typename decltype(cute::partition_fragment_C(
    TiledMma{}, cute::Shape<cute::Int<kM>, cute::Int<kN>>{}))::layout_type;

// Which element of a tile of kM x kN each register of the accumulator holds.
template <class TiledMma, int kM, int kN>
Json accumulator_json() {
  return Json::object()
      .set("rows", kM)
      .set("registers", layout_json<AccumulatorLayout<TiledMma, kM, kN>>())
      .set("expected",
           mma_partition_json<TiledMma, decltype(TiledMma{}.thrfrg_C(Numbers<kM, kN>{}))>());
}

// An operand in registers: the accumulator of an earlier product, seen through the layout (MMA,
// MMA_M, MMA_K).
template <class Layout>
Json register_operand_json(char const* accumulator) {
  return Json::object()
      .set("from", "registers")
      .set("accumulator", accumulator)
      .set("fragment", layout_json<Layout>());
}

// P or dS as the operand A of a product: what was the accumulator `Scores`.
template <class Scores>
Json scores_operand_json(char const* accumulator) {
  return register_operand_json<decltype(as_a_operand(Scores{}))>(accumulator);
}

// Where a part of a tile begins.
inline Json origin_json(int row, int col) { return json_array({row, col}); }

// The product C = A B of a tile of m x n x k. `c` describes the part of the tile that a group of
// threads computes, and `origins` lists where the part of each group begins.
inline Json product_json(char const* name, char const* formula, char const* instruction, int m,
                         int n, int k, Json const& a, Json const& b, Json const& c,
                         Json const& origins = json_array({origin_json(0, 0)})) {
  return Json::object()
      .set("name", name)
      .set("formula", formula)
      .set("instruction", instruction)
      .set("tile", Json::array().add(m).add(n).add(k))
      .set("origins", origins)
      .set("a", a)
      .set("b", b)
      .set("c", c);
}

// A buffer of shared memory. It is in use from phase `first` to phase `last`, both included. Its
// readers need an address that is a multiple of `alignment` bytes.
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
// The same for a buffer that is a member of the SharedMemory struct `plan`.
template <class SharedMemory, class Member>
Json buffer_json(char const* name, SharedMemory const& plan, Member const& member, int alignment,
                 int first, int last) {
  auto const offset = reinterpret_cast<char const*>(&member) - reinterpret_cast<char const*>(&plan);
  return buffer_json(name, int(offset), int(sizeof(member)), alignment, first, last);
}

// Threads that do the same work. `together` lists which accumulators are in registers at the same
// time, with the one that is being computed at the end. If `fixed`, setmaxnreg gives each thread
// the number of registers; otherwise it is an upper limit.
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
