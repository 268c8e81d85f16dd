// rows.h: the tables as types. One tag type per row of forward.def, named like the row, with its
// key and config; it takes no launcher's address, so that an instance file that includes it
// compiles its own kernel alone.
#pragma once

#include "cute_attention/config.h"

namespace cute_attention::rows {

#define CUTE_ATTENTION_FORWARD(NAME, ARCH, DTYPE, HEAD_DIM, HEAD_DIM_V, MASK, SCORE_MOD, TILE_M,  \
                               TILE_N, STAGES, WARPS)                                             \
  struct NAME {                                                                                   \
    static constexpr char const* kName = #NAME;                                                   \
    static constexpr KernelKey kKey{Arch::ARCH, Direction::Forward, DType::DTYPE,       HEAD_DIM, \
                                    HEAD_DIM_V, Mask::MASK,         ScoreMod::SCORE_MOD};         \
    static constexpr KernelConfig kConfig{TILE_M, TILE_N, STAGES, WARPS};                         \
  };
#include "forward.def"
#undef CUTE_ATTENTION_FORWARD

}  // namespace cute_attention::rows
