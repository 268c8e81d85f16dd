// row.h: turns a line of forward.def or backward.def into C++: a tag type that has the row's name,
// its key and its config. C++ ignores the column `ptxas`, which CMake reads.
//
// A generated instance file contains the lines of its own rows, and not the whole table. So a
// change of one line compiles one instance file again, and no other.
#pragma once

#include "cute_attention/config.h"

namespace cute_attention::rows {
using namespace score_mods;  // the column score_mods names them
}

#define CUTE_ATTENTION_ROW(NAME, DIRECTION, ARCH, DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE_MODS, TILE_M, \
                           TILE_N, STAGES, WARPS, PTXAS)                                           \
  struct NAME {                                                                                    \
    static constexpr char const* kName = #NAME;                                                    \
    static constexpr KernelKey kKey = kernel_key(Arch::ARCH, Direction::DIRECTION, DType::DTYPE,   \
                                                 HEAD_DIM, HEAD_DIM_V, SCORE_MODS);                \
    static constexpr KernelConfig kConfig{TILE_M, TILE_N, STAGES, WARPS};                          \
  };
#define CUTE_ATTENTION_FORWARD(NAME, ...) CUTE_ATTENTION_ROW(NAME, Forward, __VA_ARGS__)
#define CUTE_ATTENTION_BACKWARD(NAME, ...) CUTE_ATTENTION_ROW(NAME, Backward, __VA_ARGS__)
