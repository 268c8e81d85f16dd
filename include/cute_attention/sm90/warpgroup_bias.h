// sm90/warpgroup_bias.h: tiles of a bias (bias_tiles.h) of a backward kernel that has room for one
// tile and not for two: each consumer warpgroup has its 64 keys of it, with barriers of their own.
// So a tile is free as soon as the scores have it, long before Q of the step is.
#pragma once

#include "cute_attention/sm90/bias_tiles.h"

namespace cute_attention::sm90 {

// The tiles, of kRows queries and kCols columns of 16 bits for each warpgroup.
template <bool kHasTiles, class Element, int kRows, int kCols, int kWarpgroups>
struct WarpgroupBiasBuffers {};
template <class Element, int kRows, int kCols, int kWarpgroups>
struct WarpgroupBiasBuffers<true, Element, kRows, kCols, kWarpgroups> {
  using SmemLayoutBias =  // (M, N, WARPGROUP)
      SmemTiles<Element, kRows, kCols, kWarpgroups, kBiasBox>;
  cute::array_aligned<Element, cute::cosize_v<SmemLayoutBias>, 1024> bias;

  // The tile of a warpgroup, (M, N).
  CUTE_DEVICE Element* bias_tile(int warpgroup) { return bias.data() + warpgroup * kRows * kCols; }
};

// Their barriers. They stand apart: beside the tiles they would take 1024 bytes of alignment.
template <bool kHasTiles, int kWarpgroups>
struct WarpgroupBiasBarriers {};
template <int kWarpgroups>
struct WarpgroupBiasBarriers<true, kWarpgroups> {
  uint64_t full[kWarpgroups];   // 1 arrival, with the bytes to come
  uint64_t empty[kWarpgroups];  // the scores have the tile: kWarpgroupWarps arrivals
};

}  // namespace cute_attention::sm90
