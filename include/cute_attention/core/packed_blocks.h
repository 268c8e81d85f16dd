// core/packed_blocks.h: finds the blocks of queries of packed sequences, whose lengths only the
// device knows.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"

namespace cute_attention {

struct PackedBlock {
  int32_t batch;    // its sequence; the number of sequences where there is no such block
  int32_t m_block;  // in its sequence
};

// Finds blocks of `tile_m` queries by their index among those of all sequences, one sequence after
// the other, each from its last block to its first. It goes on from where it was: indices may not
// fall.
struct PackedBlocks {
  int32_t const* cu_seqlens;  // [batch + 1]
  int32_t batch;
  int32_t tile_m;
  int32_t first = 0;   // a sequence
  int32_t before = 0;  // blocks of the sequences before it

  // All threads of a warp call it together; each looks at one of 32 sequences.
  CUTE_DEVICE PackedBlock find(int32_t index) {
    constexpr uint32_t kWarp = 0xffffffffu;
    int32_t const lane = int32_t(threadIdx.x) % 32;
    for (; first < batch; first += 32) {
      int32_t const mine = first + lane;
      int32_t const blocks =
          mine < batch ? ceil_div(cu_seqlens[mine + 1] - cu_seqlens[mine], tile_m) : 0;
      int32_t up_to = blocks;  // blocks of sequences first to mine
      CUTE_UNROLL
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const other = __shfl_up_sync(kWarp, up_to, offset);
        up_to += lane >= offset ? other : 0;
      }
      uint32_t const past = __ballot_sync(kWarp, before + up_to > index);
      if (past != 0) {
        int const owner = __ffs(int(past)) - 1;
        int32_t const end = before + __shfl_sync(kWarp, up_to, owner);
        return {first + owner, end - 1 - index};
      }
      before += __shfl_sync(kWarp, up_to, 31);
    }
    return {batch, 0};
  }
};

}  // namespace cute_attention
