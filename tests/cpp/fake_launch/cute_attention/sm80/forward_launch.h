// forward_launch.h: stands in for include/cute_attention/sm80/forward_launch.h where a test has a
// row compiled without nvcc. A launch computes nothing: it returns an error of its own.
#pragma once

#include "cute_attention/kernel_library.h"

namespace cute_attention::sm80 {

template <class Row>
struct ForwardLaunch {
  static_assert(Row::kConfig.tile_n % 8 == 0, "a tile has a multiple of 8 keys");
  static constexpr int kThreads = Row::kConfig.warps * 32;
  static constexpr int kSharedMemoryBytes =
      2 * Row::kKey.head_dim * (Row::kConfig.tile_m + 2 * Row::kConfig.tile_n);

  static int32_t launch(void const*, LaunchContext const*) { return 1; }
  static ForwardGrid grid(ForwardParams const*) { return {1, Row::kConfig.tile_m}; }
};

}  // namespace cute_attention::sm80
