// sm90/page_load.h: loads tiles of keys from the pages of a cache, box by box.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_attention/core/page_lookup.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/tma_tile.h"

namespace cute_attention::sm90 {

// The boxes that are loaded of the KV tile of kTileN keys that begins with key `n_begin`.
template <int kTileN>
CUTE_DEVICE KeyRange boxes_of(ForwardArguments const& arguments, ForwardTile const& tile,
                              int32_t n_begin) {
  return key_boxes(tile.sequence, first_visible_key(tile.sequence, tile.m_begin), n_begin, kTileN,
                   arguments.box_rows_k);
}

// The lanes of a warp look up where such a tile lies: lane i gets where its box i begins.
template <int kTileN>
CUTE_DEVICE PageRow look_up_tile(ForwardArguments const& arguments, ForwardTile const& tile,
                                 int32_t n_begin) {
  static_assert(kTileN / kPageRows <= 32, "a lane for each box");
  return look_up_boxes(arguments.params, tile.work.batch,
                       boxes_of<kTileN>(arguments, tile, n_begin), n_begin, arguments.box_rows_k);
}

// Starts the copies of a tile of kRows x kCols, each lane those of its box. All lanes of a warp
// call it with what they have looked up. What TMA finds in a page that does not exist are zeros.
//   kBox     columns of a box
//   map      of [pages, page_size, heads_kv, columns]
//   origin   the KV head, and the tile's first column
//   of_lane  look_up_tile()
//   leader   one of the lanes
template <int kRows, int kCols, int kBox, class Element>
CUTE_DEVICE void load_pages(ForwardArguments const& arguments, CUtensorMap const& map,
                            ForwardTile const& tile, TileOrigin const& origin, int32_t n_begin,
                            PageRow const& of_lane, Element* buffer, uint64_t& full, bool leader) {
  using Boxes = TmaBoxes<kRows, kCols, kBox>;
  int32_t const rows = arguments.box_rows_k, lane = lane_of_warp();
  KeyRange const boxes = boxes_of<kRows>(arguments, tile, n_begin);
  if (leader) {
    Barrier::arrive_and_expect_tx(
        &full, uint32_t((boxes.end - boxes.begin) * rows * kCols * int(sizeof(Element))));
  }
  __syncwarp();  // the bytes are expected before they come
  if (lane >= boxes.begin && lane < boxes.end) {
    CUTE_UNROLL
    for (int box = 0; box < Boxes::kCount; ++box) {
      cute::SM90_TMA_LOAD_5D::copy(&map, &full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
                                   buffer + Boxes::offset(box) + lane * rows * Boxes::kCols,
                                   origin.col + Boxes::col(box), 0, of_lane.row, origin.head,
                                   of_lane.page);
    }
  }
  __syncwarp();
}

}  // namespace cute_attention::sm90
