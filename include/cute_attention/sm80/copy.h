// sm80/copy.h: copies of tiles between global and shared memory; what lies outside the tensor is
// neither read nor written.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/address.h"

namespace cute_attention::sm80 {

// A tile (ROWS, COLS) of one head in global memory: its first row begins at `pointer`, and each row
// begins `row_stride` elements after the one before.
template <int kRows, int kCols, class Element>
CUTE_DEVICE auto gmem_tile(Element* pointer, int64_t row_stride) {
  using namespace cute;
  return make_tensor(make_gmem_ptr(pointer), make_shape(Int<kRows>{}, Int<kCols>{}),
                     make_stride(row_stride, _1{}));
}

// The tile (ROWS, COLS) of one head of a tensor that begins with row `row`.
template <int kRows, int kCols, class Element>
CUTE_DEVICE auto head_tile(Element* tensor, Strides const& stride, int batch, int head,
                           int64_t row) {
  return gmem_tile<kRows, kCols>(row_pointer(tensor, stride, batch, head, row), stride.row);
}

// The (row, column) of each element of a tile (ROWS, COLS), to be partitioned like the tile.
template <class Tile>
CUTE_DEVICE auto tile_coordinates(Tile const& tile) {
  using namespace cute;
  return make_identity_tensor(make_shape(size<0>(tile), size<1>(tile)));
}

// Copies one vector of a tile, or writes zeros in its place where not `inside`. Source and target
// are (CPY).
template <class TiledCopy, class Source, class Target>
CUTE_DEVICE void copy_or_zeros(TiledCopy const& tiled_copy, bool inside, Source const& source,
                               Target&& target) {
  using Vector = cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, typename TiledCopy::ValType>;
  if constexpr (std::is_base_of_v<Vector, TiledCopy>) {  // through registers
    if (inside) {
      cute::copy(tiled_copy, source, target);
    } else {
      cute::clear(target);
    }
  } else {
    cute::copy(tiled_copy.with(inside), source, target);
  }
}

// Starts the copy of a tile from global memory (ROWS, COLS) to shared memory (ROWS, COLS). Zeros
// take the place of what lies outside the tensor: the columns from `cols` on, and with kCheckRows
// the rows from `rows` on.
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
  CUTE_STATIC_ASSERT_V(size<1>(tXgX) == size<1>(tXsX));
  CUTE_STATIC_ASSERT_V(size<2>(tXgX) == size<2>(tXsX));
  CUTE_STATIC_ASSERT_V(size<1>(tXgX) == size<1>(tXcX));
  CUTE_STATIC_ASSERT_V(size<2>(tXgX) == size<2>(tXcX));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tXgX); ++m) {
    bool const row_inside = !kCheckRows || int(get<0>(tXcX(0, m, 0))) < rows;
    CUTE_UNROLL
    for (int d = 0; d < size<2>(tXgX); ++d) {
      bool const inside = row_inside && int(get<1>(tXcX(0, m, d))) < cols;
      copy_or_zeros(tiled_copy, inside, tXgX(_, m, d), tXsX(_, m, d));
    }
  }
}

// Writes a tile from shared memory (ROWS, COLS) to global memory (ROWS, COLS). Leaves out what lies
// outside the tensor: the columns from `cols` on and the rows from `rows` on.
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
  CUTE_STATIC_ASSERT_V(size<1>(tXgX) == size<1>(tXsX));
  CUTE_STATIC_ASSERT_V(size<2>(tXgX) == size<2>(tXsX));
  CUTE_STATIC_ASSERT_V(size<1>(tXgX) == size<1>(tXcX));
  CUTE_STATIC_ASSERT_V(size<2>(tXgX) == size<2>(tXcX));
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

// Writes a tile from shared memory (ROWS, COLS) to rows that lie anywhere in global memory: row
// `row` begins at `row_pointer(row)`, or is left out where that is null. Leaves out the columns
// from `cols` on, too.
template <class TiledCopy, class Smem, class RowPointer>
CUTE_DEVICE void store_rows(TiledCopy const& tiled_copy, Smem const& sX,
                            RowPointer const& row_pointer, int cols, int thread) {
  using namespace cute;
  auto const thread_copy = tiled_copy.get_slice(thread);
  Tensor tXsX = thread_copy.partition_S(sX);                    // (CPY, CPY_ROWS, CPY_COLS)
  Tensor tXcX = thread_copy.partition_S(tile_coordinates(sX));  // (CPY, CPY_ROWS, CPY_COLS)
  CUTE_STATIC_ASSERT_V(shape(tXsX) == shape(tXcX));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(tXsX); ++m) {
    auto* const row = row_pointer(int(get<0>(tXcX(0, m, 0))));
    CUTE_UNROLL
    for (int d = 0; d < size<2>(tXsX); ++d) {
      int const col = int(get<1>(tXcX(0, m, d)));
      if (row != nullptr && col < cols) {
        *reinterpret_cast<uint4*>(row + col) = *reinterpret_cast<uint4 const*>(&tXsX(0, m, d));
      }
    }
  }
}

}  // namespace cute_attention::sm80
