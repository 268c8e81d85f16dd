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

// Where the box of this lane begins; row -1 if it has none. The sequence has row `table_row` of the
// table.
template <int kTileN>
CUTE_DEVICE PageRow look_up_box(ForwardArguments const& arguments, ForwardTile const& tile,
                                int32_t table_row, int32_t n_begin) {
  if (!lane_has_box<kTileN>(arguments, tile, n_begin)) {
    return {0, -1};
  }
  PageRow found;
  int32_t index;
  arguments.by_page_size(index, found.row, n_begin + lane_of_warp() * arguments.box_rows_k);
  found.page = table_entry(arguments.params.cache, table_row, index);
  return found;
}

// Starts the copies of a tile of kRows x kCols. All lanes of a warp call it with what they have
// looked up. One of them issues the boxes of all: where each lane issues its own, the compiler
// makes a loop over lanes for each block of columns, which takes twice as long. What TMA finds in a
// page that does not exist are zeros.
//   kBox     columns of a box
//   map      of [pages, page_size, heads_kv, columns]
//   origin   the KV head, and the tile's first column
//   of_lane  look_up_box()
//   leader   one of the lanes
template <int kRows, int kCols, int kBox, class Element>
CUTE_DEVICE void load_pages(ForwardArguments const& arguments, CUtensorMap const& map,
                            TileOrigin const& origin, PageRow const& of_lane, Element* buffer,
                            uint64_t& full, bool leader) {
  using Boxes = TmaBoxes<kRows, kCols, kBox>;
  int32_t const rows = arguments.box_rows_k;
  uint32_t const lanes = __ballot_sync(0xffffffffu, of_lane.row >= 0);
  if (leader) {
    int const loaded = __popc(lanes) * rows;
    Barrier::arrive_and_expect_tx(&full, uint32_t(loaded * kCols * int(sizeof(Element))));
  }
#pragma unroll 1
  for (uint32_t left = lanes; left != 0; left &= left - 1) {
    int const lane = __ffs(int(left)) - 1;
    int32_t const page = __shfl_sync(0xffffffffu, of_lane.page, lane);
    int32_t const row = __shfl_sync(0xffffffffu, of_lane.row, lane);
    if (leader) {
      CUTE_UNROLL
      for (int box = 0; box < Boxes::kCount; ++box) {
        cute::SM90_TMA_LOAD_5D::copy(&map, &full, uint64_t(arguments.keys_hint),
                                     buffer + Boxes::offset(box) + lane * rows * Boxes::kCols,
                                     origin.col + Boxes::col(box), 0, row, origin.head, page);
      }
    }
  }
}

}  // namespace cute_attention::sm90
