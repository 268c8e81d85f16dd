// sm80/tile_walk.h: copies the tiles of keys of one head into one buffer, one tile after the other,
// the last tile first.
//
// A thread keeps two addresses: where its part of the next tile begins in global and in shared
// memory. All other addresses are these two plus constants and multiples of the row stride, so that
// a copy issues few instructions besides its cp.async. The copies stand between products, where
// every instruction takes time.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/opaque.h"
#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/swizzled_layout.h"

namespace cute_attention::sm80 {

// Copies 16 bytes from global to shared memory, or writes 16 zero bytes where not `inside`. PTX
// ISA, "cp.async".
CUTE_DEVICE void cp_async_or_zeros(uint32_t target, void const* source, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(inside ? 16 : 0));
}

//   TiledCopy    copies 16-byte vectors
//   SmemLayout   (ROWS, COLS) of a tile; the distance between two passes of the copy is a multiple
//                of a swizzle atom
template <class TiledCopy, class SmemLayout>
struct TileWalk {
  using Element = typename TiledCopy::ValType;
  static constexpr int kRows = decltype(cute::size<0>(SmemLayout{}))::value;
  static constexpr int kCols = decltype(cute::size<1>(SmemLayout{}))::value;
  // In one step of a pass all threads together copy kPassRows rows of kSwizzleCols columns.
  static constexpr int kThreads = decltype(cute::size(TiledCopy{}))::value;
  static constexpr int kPassRows = kThreads * kVector / kSwizzleCols<kCols>;
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kSteps = kCols / kSwizzleCols<kCols>;
  using Swizzled = SwizzledLayout<SmemLayout>;
  // Offsets in the tile before the swizzle: (THREAD, (8, 1), (CPY_ROWS, CPY_COLS)).
  using Places = decltype(TiledCopy::tidfrg_D(typename Swizzled::Linear{}));

  // How far a thread's vector `step` of pass `pass` lies from its first vector: in bytes of shared
  // memory, and in rows and columns of the tile.
  CUTE_HOST_DEVICE static constexpr uint32_t offset(int pass, int step) {
    using namespace cute;
    return Swizzled::swizzle(Places{}(_0{}, _0{}, make_coord(pass, step))) *
           uint32_t(sizeof(Element));
  }
  CUTE_HOST_DEVICE static constexpr int row(int pass) { return pass * kPassRows; }
  CUTE_HOST_DEVICE static constexpr int col(int step) { return step * kSwizzleCols<kCols>; }

  Element const* source;  // this thread's first vector of the last pass of the tile to load next
  uint32_t target;        // shared-memory address of this thread's first vector of a tile

  // The walk begins at the tile whose first row is `tile`. Rows begin `row_stride` elements apart.
  CUTE_DEVICE TileWalk(Element const* tile, int64_t row_stride, Element const* buffer, int thread) {
    using namespace cute;
    // Here and not in the class, so that the layout lab can look at a layout that breaks them.
    CUTE_STATIC_ASSERT_V((size<2, 0>(Places{}) == Int<kPasses>{}));
    CUTE_STATIC_ASSERT_V((size<2, 1>(Places{}) == Int<kSteps>{}));
    auto const place = coordinates(uint32_t(thread))(0, 0, 0);
    source =
        pinned(tile + (int(get<0>(place)) + row(kPasses - 1)) * row_stride + int(get<1>(place)));
    target = pinned(cast_smem_ptr_to_uint(buffer) +
                    Swizzled::swizzle(Places{}(uint32_t(thread), _0{}, _0{})) *
                        uint32_t(sizeof(Element)));
  }

  // The (row, column) in a tile of each of this thread's elements, (CPY, CPY_ROWS, CPY_COLS).
  CUTE_DEVICE static constexpr auto coordinates(uint32_t thread) {
    return TiledCopy{}.get_slice(thread).partition_S(
        cute::make_identity_tensor(cute::product_each(cute::shape(SmemLayout{}))));
  }

  // Starts the copy of the next tile, its last rows first. Zeros take the place of the columns from
  // `cols` on, and with kCheckRows of the rows from `rows` on.
  template <bool kCheckRows>
  CUTE_DEVICE void load(int64_t row_stride, int rows, int cols, int thread) {
    using namespace cute;
    auto const place = coordinates(uint32_t(opaque(thread)))(0, 0, 0);
    CUTE_UNROLL
    for (int pass = kPasses - 1; pass >= 0; --pass) {
      bool const row_inside = !kCheckRows || int(get<0>(place)) + row(pass) < rows;
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        bool const inside = row_inside && int(get<1>(place)) + col(step) < cols;
        cp_async_or_zeros(target + offset(pass, step), source + col(step), inside);
      }
      // Opaque, so that the compiler computes each address from the one before; else it computes
      // all of them from the first, with more instructions.
      source = opaque(source - kPassRows * row_stride);
    }
    cp_async_fence();
  }

  // Starts the copy of a tile whose rows lie anywhere: row `row` begins at `row_pointer(row)`, or
  // is to be zeros where that is null. Zeros also take the place of the columns from `cols` on.
  template <class RowPointer>
  CUTE_DEVICE void load_rows(RowPointer const& row_pointer, int cols, int thread) const {
    using namespace cute;
    auto const place = coordinates(uint32_t(opaque(thread)))(0, 0, 0);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      Element const* const first = row_pointer(int(get<0>(place)) + row(pass));
      CUTE_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        int const from = int(get<1>(place)) + col(step);
        cp_async_or_zeros(target + offset(pass, step), first + from,
                          first != nullptr && from < cols);
      }
    }
    cp_async_fence();
  }
};

}  // namespace cute_attention::sm80
