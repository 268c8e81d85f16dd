// core/packed_blocks.h: finds the blocks of queries, or of keys, of packed sequences. Only the
// device knows the lengths of these sequences.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/warp.h"

namespace cute_attention {

struct PackedBlock {
  int32_t batch;  // the block's sequence; if there is no such block, the number of sequences
  int32_t after;  // how many blocks of its sequence have a higher index
};

// Finds blocks of `tile` rows by index. The index counts the blocks of all sequences, one sequence
// after the other. A search goes on where the one before ended, so no index may be smaller than the
// one before.
struct PackedBlocks {
  int32_t const* cu_seqlens;  // [batch + 1]
  int32_t batch;
  int32_t tile;
  int32_t first = 0;   // the sequence at which the next search begins
  int32_t before = 0;  // how many blocks the sequences before `first` have

  // All threads of a warp call it together. They look at 32 sequences at a time, one each.
  CUTE_DEVICE PackedBlock find(int32_t index) {
    constexpr uint32_t kWarp = 0xffffffffu;
    int32_t const lane = lane_of_warp();
    for (; first < batch; first += 32) {
      int32_t const mine = first + lane;
      int32_t const blocks =
          mine < batch ? ceil_div(cu_seqlens[mine + 1] - cu_seqlens[mine], tile) : 0;
      int32_t up_to = blocks;  // at the end of the loop: blocks of the sequences first to mine
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
