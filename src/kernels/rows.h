// rows.h: the tables as types. One tag type per row of forward.def and backward.def, named like the
// row, with its key and config; it takes no launcher's address, so that an instance file that
// includes it compiles its own kernels alone.
#pragma once

#include "cute_attention/config.h"

namespace cute_attention::rows {

#define CUTE_ATTENTION_ROW(NAME, DIRECTION, ARCH, DTYPE, HEAD_DIM, HEAD_DIM_V, MASK, SCORE_MOD, \
                           TILE_M, TILE_N, STAGES, WARPS)                                       \
  struct NAME {                                                                                 \
    static constexpr char const* kName = #NAME;                                                 \
    static constexpr KernelKey kKey{                                                            \
        Arch::ARCH, Direction::DIRECTION, DType::DTYPE,       HEAD_DIM,                         \
        HEAD_DIM_V, Mask::MASK,           ScoreMod::SCORE_MOD};                                 \
    static constexpr KernelConfig kConfig{TILE_M, TILE_N, STAGES, WARPS};                       \
  };
#define CUTE_ATTENTION_FORWARD(NAME, ...) CUTE_ATTENTION_ROW(NAME, Forward, __VA_ARGS__)
#define CUTE_ATTENTION_BACKWARD(NAME, ...) CUTE_ATTENTION_ROW(NAME, Backward, __VA_ARGS__)
#include "backward.def"
#include "forward.def"
#undef CUTE_ATTENTION_FORWARD
#undef CUTE_ATTENTION_BACKWARD
#undef CUTE_ATTENTION_ROW

}  // namespace cute_attention::rows
