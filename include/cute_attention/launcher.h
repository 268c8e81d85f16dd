// launcher.h: what a generated instance file needs: a row's entry in the table of its kernel
// library.
#pragma once

#include "cute_attention/kernel_library.h"

namespace cute_attention {

// `Row` is a tag type of src/kernels/row.h; `Launch` is <arch>/<direction>_launch.h's class for
// it, with kThreads, kSharedMemoryBytes and a static launch() that is a LaunchFunction.
template <class Row, class Launch>
KernelRow make_kernel_row() {
  static_assert(Row::kConfig.tile_m <= kMaxTile && Row::kConfig.tile_n <= kMaxTile,
                "a tile reaches no further past the end of a sequence than 32 bits can count");
  return {Row::kName,     Row::kKey, Row::kConfig, Launch::kThreads, Launch::kSharedMemoryBytes,
          &Launch::launch};
}

}  // namespace cute_attention

// Defines cute_attention::rows::row_<name>(), which the library's generated table calls. LAUNCH is
// a template over the row, such as sm80::ForwardLaunch.
#define CUTE_ATTENTION_LAUNCHER(NAME, LAUNCH)                              \
  namespace cute_attention::rows {                                         \
  KernelRow row_##NAME() { return make_kernel_row<NAME, LAUNCH<NAME>>(); } \
  }
