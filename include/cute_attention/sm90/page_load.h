// sm90/page_load.h: loads tiles of keys from the pages of a cache, box by box.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_attention/core/key_pages.h"
#include "cute_attention/core/warp.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/tma_tile.h"

namespace cute_attention::sm90 {

// Whether this lane has a box of the KV tile of kTileN keys that begins with key `n_begin`, one
// that is loaded: lane i has box i of the tile.
template <int kTileN>
CUTE_DEVICE bool lane_has_box(ForwardArguments const& arguments, ForwardTile const& tile,
                              int32_t n_begin) {
  static_assert(kTileN / kPageRows <= 32, "a lane for each box");
  KeyRange const rows = key_rows(tile.sequence, tile.first_loaded, n_begin, kTileN);
  int32_t const row = lane_of_warp() * arguments.box_rows_k;
  return row >= rows.begin && row < rows.end;
}

// Where the box of this lane begins, and page -1 if it has none. The sequence has row `table_row`
// of the table.
template <int kTileN>
CUTE_DEVICE PageRow look_up_box(ForwardArguments const& arguments, ForwardTile const& tile,
                                int32_t table_row, int32_t n_begin) {
  if (!lane_has_box<kTileN>(arguments, tile, n_begin)) {
    return {-1, 0};
  }
  return page_row(arguments.params.cache, table_row,
                  n_begin + lane_of_warp() * arguments.box_rows_k);
}

// Starts the copies of a tile of kRows x kCols, each lane those of its box. All lanes of a warp
// call it with what they have looked up. What TMA finds in a page that does not exist are zeros.
//   kBox     columns of a box
//   map      of [pages, page_size, heads_kv, columns]
//   origin   the KV head, and the tile's first column
//   of_lane  look_up_box()
//   leader   one of the lanes
template <int kRows, int kCols, int kBox, class Element>
CUTE_DEVICE void load_pages(ForwardArguments const& arguments, CUtensorMap const& map,
                            ForwardTile const& tile, TileOrigin const& origin, int32_t n_begin,
                            PageRow const& of_lane, Element* buffer, uint64_t& full, bool leader) {
  using Boxes = TmaBoxes<kRows, kCols, kBox>;
  int32_t const rows = arguments.box_rows_k, lane = lane_of_warp();
  bool const has_box = lane_has_box<kRows>(arguments, tile, n_begin);
  int const boxes = __popc(__ballot_sync(0xffffffffu, has_box));
  if (leader) {
    Barrier::arrive_and_expect_tx(&full, uint32_t(boxes * rows * kCols * int(sizeof(Element))));
  }
  __syncwarp();  // the bytes are expected before they come
  if (has_box) {
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
