// launcher.h: makes the entry of a row in the table of its kernel library, for the generated
// instance files.
#pragma once

#include "cute_attention/kernel_library.h"

namespace cute_attention {

// Asks a row for its answers. `Row` is a tag type of src/kernels/row.h. `Launch` is the class for
// it from <arch>/<direction>_launch.h, which has
//
//   kThreads, kSharedMemoryBytes  of a CTA
//   launch()                      a LaunchFunction
//   workspace()                   a WorkspaceFunction, in a backward row
template <class Row, class Launch>
KernelRow make_kernel_row() {
  static_assert(Row::kConfig.tile_m <= kMaxTile && Row::kConfig.tile_n <= kMaxTile,
                "the last tile of a sequence ends at a position that 32 bits can count");
  WorkspaceFunction workspace = nullptr;
  if constexpr (Row::kKey.direction == Direction::Backward) {
    workspace = &Launch::workspace;
  }
  return {Row::kName, Row::kKey,      Row::kConfig, Launch::kThreads, Launch::kSharedMemoryBytes,
          workspace,  &Launch::launch};
}

}  // namespace cute_attention

// Defines cute_attention::rows::row_<name>(), which the library's generated table calls. LAUNCH is
// a template over the row, such as sm80::ForwardLaunch.
#define CUTE_ATTENTION_LAUNCHER(NAME, LAUNCH)                              \
  namespace cute_attention::rows {                                         \
  KernelRow row_##NAME() { return make_kernel_row<NAME, LAUNCH<NAME>>(); } \
  }
