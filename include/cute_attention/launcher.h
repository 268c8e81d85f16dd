// launcher.h: makes the entry of a row in the table of its kernel library, for the generated
// instance files.
#pragma once

#include "cute_attention/kernel_library.h"

namespace cute_attention {

// Makes the KernelRow of a row. `Row` is a tag type of src/kernels/row.h. `Launch` is the class for
// the row from <arch>/<direction>_launch.h. It must have these static members:
//
//   kThreads            the threads of a CTA
//   kSharedMemoryBytes  the dynamic shared memory of a CTA
//   launch()            a LaunchFunction
//   workspace()         a WorkspaceFunction; only in a backward row
//   grid()              a GridFunction; only in a forward row
template <class Row, class Launch>
KernelRow make_kernel_row() {
  static_assert(Row::kConfig.tile_m <= kMaxTile && Row::kConfig.tile_n <= kMaxTile,
                "the last tile of a sequence ends at a position that 32 bits can count");
  WorkspaceFunction workspace = nullptr;
  GridFunction grid = nullptr;
  if constexpr (Row::kKey.direction == Direction::Backward) {
    workspace = &Launch::workspace;
  } else {
    grid = &Launch::grid;
  }
  return {Row::kName, Row::kKey,       Row::kConfig, Launch::kThreads, Launch::kSharedMemoryBytes,
          workspace,  &Launch::launch, grid};
}

}  // namespace cute_attention

// Defines the function cute_attention::rows::row_<name>(). The generated table of the library calls
// it. LAUNCH is a class template whose argument is the row, such as sm80::ForwardLaunch.
#define CUTE_ATTENTION_LAUNCHER(NAME, LAUNCH)                              \
  namespace cute_attention::rows {                                         \
  KernelRow row_##NAME() { return make_kernel_row<NAME, LAUNCH<NAME>>(); } \
  }
