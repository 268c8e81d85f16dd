// boxes.h: writes the boxes as JSON with which TMA fills tiles in shared memory, or stores them.
#pragma once

#include "layouts/describe.h"

#include "cute_attention/sm90/tma_boxes.h"

namespace cute_attention::layouts {

// The boxes of `groups` tiles that lie one below the other. The layout `Tile` has the elements of
// all of them. `Mapped` are the boxes that the host describes in the tensor map.
template <class Tile, class Boxes, class Mapped = Boxes>
Json boxes_json(char const* tensor, int groups = 1) {
  Json boxes = Json::array();
  for (int group = 0; group < groups; ++group) {
    for (int box = 0; box < Boxes::kCount; ++box) {
      boxes.add(Json::object()
                    .set("row", group * Boxes::kRows)
                    .set("col", Boxes::col(box))
                    .set("address", Boxes::offset(group * Boxes::kCount + box)));
    }
  }
  return Json::object()
      .set("kind", "boxes")
      .set("tensor", tensor)
      .set("rows", groups * Boxes::kRows)
      .set("box", Json::array().add(Boxes::kRows).add(Boxes::kCols))
      .set("swizzle_bits", Boxes::kSwizzleBits)
      .set("map", json_array({Mapped::kRows, Mapped::kCols, Mapped::kSwizzleBits}))
      .set("boxes", boxes)
      .set("smem", smem_json<Tile>(tensor));
}

// The boxes with which TMA stores `groups` tiles that lie one below the other.
template <class Tile, class Boxes>
Json stored_boxes_json(char const* tensor, int groups) {
  return boxes_json<Tile, Boxes>(tensor, groups).set("stored", true);
}

}  // namespace cute_attention::layouts
