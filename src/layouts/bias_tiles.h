// bias_tiles.h: describes the tiles of a bias in the shared memory of a kernel, if it has them. How
// threads read them is tested by tests/cpp/test_bias_tiles.cpp.
#pragma once

#include "layouts/boxes.h"
#include "layouts/descriptors.h"

#include "cute_attention/sm90/bias_tiles.h"

namespace cute_attention::layouts {

// Adds their buffer to the buffers of a plan.
template <class Traits>
Json with_bias_buffer(Json buffers, typename Traits::SharedMemory const& plan) {
  if constexpr (Traits::kBiasTiles) {
    using Layout = typename Traits::SharedMemory::SmemLayoutBias;
    buffers.add(buffer_json("bias", plan, plan.bias, swizzle_alignment<Layout>(), 0, 0));
  }
  return buffers;
}

// Adds the boxes of a tile to the copies of a kernel.
template <class Traits>
Json with_bias_boxes(Json copies) {
  if constexpr (Traits::kBiasTiles) {
    using Layout = typename Traits::SharedMemory::SmemLayoutBias;  // of a stage, or a warpgroup
    using Tile = RowsOfGroups<Layout, 1>;
    constexpr int kRows = cute::size<0>(Layout{}), kCols = cute::size<1>(Layout{});
    copies.add(boxes_json<Tile, sm90::TmaBoxes<kRows, kCols, sm90::kBiasBox>>("bias"));
  }
  return copies;
}

}  // namespace cute_attention::layouts
