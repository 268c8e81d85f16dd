// row.h: what a line of forward.def and backward.def is in C++: a tag type named like the row, with
// its key and config. An instance file has its own lines alone, so that a row added or changed
// compiles no other but that of the other dtype.
#pragma once

#include "cute_attention/config.h"

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
