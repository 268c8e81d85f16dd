// sm80/tile_walk.h: the tiles of keys of one head, copied one after the other into one buffer, last
// tile first.
//
// A thread keeps where its part of the next tile begins, in global and in shared memory. All else
// is that plus constants and multiples of the row stride: a copy costs little more than its
// cp.async, which stand between products where every instruction counts.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/opaque.h"
#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/swizzled_layout.h"

namespace cute_attention::sm80 {

// 16 bytes from global to shared memory, or as many zeros. PTX ISA, "cp.async".
CUTE_DEVICE void cp_async_or_zeros(uint32_t target, void const* source, bool inside) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(inside ? 16 : 0));
}

//   TiledCopy    of 16-byte vectors
//   SmemLayout   (ROWS, COLS) of a tile; passes of the copy are whole swizzle atoms apart
template <class TiledCopy, class SmemLayout>
struct TileWalk {
  using Element = typename TiledCopy::ValType;
  static constexpr int kRows = decltype(cute::size<0>(SmemLayout{}))::value;
  static constexpr int kCols = decltype(cute::size<1>(SmemLayout{}))::value;
  // A pass of the copy: whole rows of kSwizzleCols columns.
  static constexpr int kThreads = decltype(cute::size(TiledCopy{}))::value;
  static constexpr int kPassRows = kThreads * kVector / kSwizzleCols<kCols>;
  static constexpr int kPasses = kRows / kPassRows;
  static constexpr int kSteps = kCols / kSwizzleCols<kCols>;
  using Swizzled = SwizzledLayout<SmemLayout>;
  // (THREAD, (8, 1), (CPY_ROWS, CPY_COLS)) of a tile before the swizzle.
  using Places = decltype(TiledCopy::tidfrg_D(typename Swizzled::Linear{}));

  // How far vector `step` of pass `pass` of a thread is from its first: bytes in shared memory,
  // rows and columns of the tile.
  CUTE_HOST_DEVICE static constexpr uint32_t offset(int pass, int step) {
    using namespace cute;
    return Swizzled::swizzle(Places{}(_0{}, _0{}, make_coord(pass, step))) *
           uint32_t(sizeof(Element));
  }
  CUTE_HOST_DEVICE static constexpr int row(int pass) { return pass * kPassRows; }
  CUTE_HOST_DEVICE static constexpr int col(int step) { return step * kSwizzleCols<kCols>; }

  Element const* source;  // this thread's first vector in the last pass of the tile to load next
  uint32_t target;        // shared-memory address of its first vector of a tile

  // `tile` is the first row of the tile where the walk begins, with rows `row_stride` apart.
  CUTE_DEVICE TileWalk(Element const* tile, int64_t row_stride, Element const* buffer, int thread) {
    using namespace cute;
    auto const place = coordinates(uint32_t(thread))(0, 0, 0);
    source =
        pinned(tile + (int(get<0>(place)) + row(kPasses - 1)) * row_stride + int(get<1>(place)));
    target = pinned(cast_smem_ptr_to_uint(buffer) +
                    Swizzled::swizzle(Places{}(uint32_t(thread), _0{}, _0{})) *
                        uint32_t(sizeof(Element)));
  }

  // (row, column) in a tile of this thread's vectors, (CPY, CPY_ROWS, CPY_COLS).
  CUTE_DEVICE static constexpr auto coordinates(uint32_t thread) {
    return TiledCopy{}.get_slice(thread).partition_S(
        cute::make_identity_tensor(cute::product_each(cute::shape(SmemLayout{}))));
  }

  // Starts the copy of the next tile, last rows first. Columns from `cols` on become zeros, and
  // with kCheckRows rows from `rows` on.
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
      // One step at a time: the compiler would rather compute all rows from the first.
      source = opaque(source - kPassRows * row_stride);
    }
    cp_async_fence();
  }
};

}  // namespace cute_attention::sm80
