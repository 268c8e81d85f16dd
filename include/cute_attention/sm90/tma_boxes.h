// sm90/tma_boxes.h: how TMA fills a tile in shared memory. The kernel issues these boxes, the host
// describes them in tensor maps, and the layout lab exports them.
#pragma once

namespace cute_attention::sm90 {

// Columns of a swizzled block and of a TMA box: 64 elements (128 bytes, all 32 banks) where the
// head dim allows, else 32.
template <int kCols>
constexpr int kBoxCols = kCols % 64 == 0 ? 64 : 32;

// The swizzle of a box of 16-bit elements, in bits of Swizzle<bits, 3, 3>: 128 bytes or 64.
constexpr int box_swizzle_bits(int box_cols) { return box_cols == 64 ? 3 : 2; }

// A tile of kTileRows x kTileCols: boxes of all rows, one block of columns after the other, each
// row-major and swizzled within its rows.
template <int kTileRows, int kTileCols>
struct TmaBoxes {
  static constexpr int kRows = kTileRows;
  static constexpr int kCols = kBoxCols<kTileCols>;
  static constexpr int kCount = kTileCols / kCols;
  static constexpr int kSwizzleBits = box_swizzle_bits(kCols);

  // The first column of a box, and where it begins in the tile's buffer, in elements.
  static constexpr int col(int box) { return box * kCols; }
  static constexpr int offset(int box) { return box * kRows * kCols; }
};

}  // namespace cute_attention::sm90
