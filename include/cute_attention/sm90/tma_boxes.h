// sm90/tma_boxes.h: how TMA fills a tile in shared memory. The kernel issues these boxes, the host
// describes them in tensor maps, and the layout lab exports them.
#pragma once

namespace cute_attention::sm90 {

// Columns of a swizzled block and of a TMA box: 64 elements (128 bytes, all 32 banks) where whole
// boxes fill kCols columns, else 32, else 16.
template <int kCols>
constexpr int kBoxCols = kCols % 64 == 0   ? 64
                         : kCols % 32 == 0 ? 32
                                           : 16;

// The same where the swizzle takes at most `swizzle` bytes: 128, 64 or 32.
template <int kCols>
constexpr int narrow_box_cols(int swizzle) {
  return swizzle / 2 < kBoxCols<kCols> ? swizzle / 2 : kBoxCols<kCols>;
}

// The swizzle of a box of 16-bit elements, in bits of Swizzle<bits, 3, 3>: 128 bytes, 64 or 32.
constexpr int box_swizzle_bits(int box_cols) { return box_cols == 64 ? 3 : box_cols == 32 ? 2 : 1; }

// A tile of kTileRows x kTileCols: boxes of all rows, one block of kBox columns after the other,
// each row-major and swizzled within its rows.
template <int kTileRows, int kTileCols, int kBox = kBoxCols<kTileCols>>
struct TmaBoxes {
  static_assert(kTileCols % kBox == 0, "whole boxes");
  static constexpr int kRows = kTileRows;
  static constexpr int kCols = kBox;
  static constexpr int kCount = kTileCols / kCols;
  static constexpr int kSwizzleBits = box_swizzle_bits(kCols);

  // The first column of a box, and where its row `row` begins in the tile's buffer, in elements.
  static constexpr int col(int box) { return box * kCols; }
  static constexpr int offset(int box, int row = 0) { return (box * kRows + row) * kCols; }
};

}  // namespace cute_attention::sm90
