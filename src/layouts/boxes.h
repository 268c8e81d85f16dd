// boxes.h: writes the boxes as JSON with which TMA fills tiles in shared memory, or stores them.
#pragma once

#include "layouts/describe.h"

#include "cute_attention/sm90/tma_boxes.h"

namespace cute_attention::layouts {

// The boxes of `groups` tiles that lie one below the other, of kBoxRows rows each, of which a tile
// has some below each other and some side by side. The layout `Tile` has the elements of all of
// them. `Mapped` are the boxes that the host describes in the tensor map.
template <class Tile, class Boxes, class Mapped = Boxes, int kBoxRows = Boxes::kRows>
Json boxes_json(char const* tensor, int groups = 1) {
  Json boxes = Json::array();
  for (int group = 0; group < groups; ++group) {
    for (int row = 0; row < Boxes::kRows; row += kBoxRows) {
      for (int box = 0; box < Boxes::kCount; ++box) {
        boxes.add(Json::object()
                      .set("row", group * Boxes::kRows + row)
                      .set("col", Boxes::col(box))
                      .set("address", Boxes::offset(group * Boxes::kCount + box, row)));
      }
    }
  }
  return Json::object()
      .set("kind", "boxes")
      .set("tensor", tensor)
      .set("rows", groups * Boxes::kRows)
      .set("box", Json::array().add(kBoxRows).add(Boxes::kCols))
      .set("swizzle_bits", Boxes::kSwizzleBits)
      .set("map", json_array({kBoxRows < Boxes::kRows ? kBoxRows : Mapped::kRows, Mapped::kCols,
                              Mapped::kSwizzleBits}))
      .set("boxes", boxes)
      .set("smem", smem_json<Tile>(tensor));
}

// The boxes of kBoxRows rows in which TMA stores such tiles.
template <class Tile, class Boxes, int kBoxRows>
Json stored_boxes_json(char const* tensor, int groups) {
  return boxes_json<Tile, Boxes, Boxes, kBoxRows>(tensor, groups).set("stored", true);
}

}  // namespace cute_attention::layouts
