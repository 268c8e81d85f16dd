// sm80/copy.h: tiles between global and shared memory, with the tensor's edges as predicates.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/params.h"

namespace cute_attention::sm80 {

// Global memory of one head's tile: (rows, cols) at `pointer` with rows `row_stride` apart.
template <int kRows, int kCols, class Element>
CUTE_DEVICE auto gmem_tile(Element* pointer, int64_t row_stride) {
  using namespace cute;
  return make_tensor(make_gmem_ptr(pointer), make_shape(Int<kRows>{}, Int<kCols>{}),
                     make_stride(row_stride, _1{}));
}

// Rows [row, row + kRows) of one head of a tensor.
template <int kRows, int kCols, class Element>
CUTE_DEVICE auto head_tile(Element* tensor, Strides const& stride, int batch, int head,
                           int64_t row) {
  return gmem_tile<kRows, kCols>(
      tensor + batch * stride.batch + head * stride.head + row * stride.row, stride.row);
}

// Coordinates (row, column) of a tile, partitioned like the tile itself.
template <class Tile>
CUTE_DEVICE auto tile_coordinates(Tile const& tile) {
  using namespace cute;
  return make_identity_tensor(make_shape(size<0>(tile), size<1>(tile)));
}

// Starts the copy of a tile from global memory (ROWS, COLS) to shared memory (ROWS, COLS); what
// lies outside the tensor is filled with zeros. Columns from `cols` on are outside, and with
// kCheckRows rows from `rows` on.
template <bool kCheckRows, class TiledCopy, class Gmem, class Smem>
CUTE_DEVICE void load_tile(TiledCopy const& tiled_copy, Gmem const& gX, Smem&& sX, int rows,
                           int cols, uint32_t thread) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(gX) == size<0>(sX));
  CUTE_STATIC_ASSERT_V(size<1>(gX) == size<1>(sX));
  auto const thread_copy = tiled_copy.get_slice(thread);
  Tensor tXgX = thread_copy.partition_S(gX);                    // (CPY, CPY_ROWS, CPY_COLS)
  Tensor tXsX = thread_copy.partition_D(sX);                    // (CPY, CPY_ROWS, CPY_COLS)
  Tensor tXcX = thread_copy.partition_S(tile_coordinates(gX));  // (CPY, CPY_ROWS, CPY_COLS)
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tXgX); ++m) {
    bool const row_inside = !kCheckRows || int(get<0>(tXcX(0, m, 0))) < rows;
    CUTE_UNROLL
    for (int d = 0; d < size<2>(tXgX); ++d) {
      bool const inside = row_inside && int(get<1>(tXcX(0, m, d))) < cols;
      copy(tiled_copy.with(inside), tXgX(_, m, d), tXsX(_, m, d));
    }
  }
}

// Writes a tile from shared memory (ROWS, COLS) to global memory (ROWS, COLS), and nothing outside
// the tensor.
template <class TiledCopy, class Smem, class Gmem>
CUTE_DEVICE void store_tile(TiledCopy const& tiled_copy, Smem const& sX, Gmem&& gX, int rows,
                            int cols, int thread) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(gX) == size<0>(sX));
  CUTE_STATIC_ASSERT_V(size<1>(gX) == size<1>(sX));
  auto const thread_copy = tiled_copy.get_slice(thread);
  Tensor tXsX = thread_copy.partition_S(sX);                    // (CPY, CPY_ROWS, CPY_COLS)
  Tensor tXgX = thread_copy.partition_D(gX);                    // (CPY, CPY_ROWS, CPY_COLS)
  Tensor tXcX = thread_copy.partition_S(tile_coordinates(gX));  // (CPY, CPY_ROWS, CPY_COLS)
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tXgX); ++m) {
    CUTE_UNROLL
    for (int d = 0; d < size<2>(tXgX); ++d) {
      if (int(get<0>(tXcX(0, m, 0))) < rows && int(get<1>(tXcX(0, m, d))) < cols) {
        copy(tiled_copy, tXsX(_, m, d), tXgX(_, m, d));
      }
    }
  }
}

}  // namespace cute_attention::sm80
