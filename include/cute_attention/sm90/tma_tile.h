// sm90/tma_tile.h: copies a tile from global to shared memory by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/tma_boxes.h"

namespace cute_attention::sm90 {

// Where a tile begins, in the coordinates of its tensor map (tensor_map.h).
struct TileOrigin {
  int32_t batch;          // 0 where sequences are packed
  int32_t head;           // the group of heads
  int32_t head_of_group;  // the tile's first head among those of the group
  int32_t row;            // of the tensor
  int32_t col = 0;        // likewise
};

// Starts the copies of a tile of kRows x kCols whose first row is `row` rows after the origin, box
// by box. One thread calls it, after it has told `full` how many bytes to expect.
template <int kRows, int kCols, int kBox = kBoxCols<kCols>, class Element>
CUTE_DEVICE void load_boxes(CUtensorMap const& map, TileOrigin const& origin, int32_t row,
                            Element* buffer, uint64_t& full, cute::TMA::CacheHintSm90 hint) {
  using Boxes = TmaBoxes<kRows, kCols, kBox>;
  // A producer thread has few registers: many boxes are not issued all at once.
  constexpr int kUnroll = Boxes::kCount <= 4 ? Boxes::kCount : 1;
#pragma unroll kUnroll
  for (int box = 0; box < Boxes::kCount; ++box) {
    cute::SM90_TMA_LOAD_5D::copy(&map, &full, uint64_t(hint), buffer + Boxes::offset(box),
                                 origin.col + Boxes::col(box), origin.head_of_group,
                                 origin.row + row, origin.head, origin.batch);
  }
}

// Sets the rows [begin, end) of a tile of kRows x kCols to zero. Swizzling moves 16-byte vectors
// only within their row of a box, so that whole rows can be cleared as if nothing were swizzled.
// The threads of a warp call it together.
template <int kRows, int kCols, int kBox = kBoxCols<kCols>, class Element>
CUTE_DEVICE void clear_rows(Element* buffer, int32_t begin, int32_t end = kRows) {
  using Boxes = TmaBoxes<kRows, kCols, kBox>;
  constexpr int kVectors = Boxes::kCols * int(sizeof(Element)) / 16;  // of a row of a box
  CUTE_UNROLL
  for (int index = 0; index < Boxes::kCount; ++index) {
    auto* const box = reinterpret_cast<uint4*>(buffer + Boxes::offset(index));
    for (int i = begin * kVectors + lane_of_warp(); i < end * kVectors; i += 32) {
      box[i] = uint4{};
    }
  }
}

// Tells the consumers of a tile that it is there, once the lanes of a warp have overwritten rows of
// it. They call it together; one of them, which `arrives`, has the barrier.
CUTE_DEVICE void tell_mended(uint64_t& full, bool arrives) {
  fence_shared_memory();  // before WGMMAs read what these lanes wrote
  __syncwarp();
  if (arrives) {
    Barrier::arrive(&full);
  }
}

}  // namespace cute_attention::sm90
