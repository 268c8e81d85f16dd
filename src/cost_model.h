// cost_model.h: how long a row would take on a problem. It ranks rows that serve the same problem;
// it predicts nothing.
#pragma once

#include "cute_attention/c_api.h"
#include "cute_attention/kernel_library.h"

namespace cute_attention {

// Key tiles that the CTAs of one head visit: whole tiles, so that what a mask or a ragged end
// wastes counts.
struct TileWork {
  int64_t ctas;     // query tiles of one head
  int64_t tiles;    // key tiles of all of them
  int64_t longest;  // key tiles of the busiest
};
TileWork tile_work(Problem const& problem, KernelConfig const& config);

double estimate_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device);

}  // namespace cute_attention
