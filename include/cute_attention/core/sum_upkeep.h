// core/sum_upkeep.h: sums of dQ that the backward kernel itself sets to zero and makes dQ of, while
// they are in L2.
//
// The kernel takes the KV heads in groups, one after the other (core/grad_tile.h). A CTA that has
// block n of keys of a head also keeps the sums of the heads at the same place of the groups beside
// its own: it sets slice n of the next group's to zero, and makes dQ of slice n of the group
// before, once all blocks of that head have been added. So nobody waits for long, and the kernels
// before and after have the sums of the first and of the last group alone.
//
// Nobody waits for ever: a wait is for CTAs with blocks of groups before, and no CTA has a block
// before it runs.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention {

struct SumUpkeep {
  int32_t per_group;  // KV heads of a group; 0: the kernels before and after have all sums
  int32_t all_heads;  // KV heads of all sequences together
  // [2, all_heads], of each KV head: how many slices of its sums are zero, and how many parts of
  // its blocks have been added.
  int32_t* counters;

  CUTE_HOST_DEVICE constexpr bool is_used() const { return per_group > 0; }

  // Whether the kernel before, or after, has the sums of a KV head of all sequences.
  CUTE_HOST_DEVICE constexpr bool begins_before(int32_t head) const {
    return !is_used() || head < per_group;
  }
  CUTE_HOST_DEVICE constexpr bool ends_after(int32_t head) const {
    return !is_used() || head >= all_heads - per_group;
  }

  CUTE_HOST_DEVICE constexpr int32_t* slices_of_zeros(int32_t head) const {
    return counters + head;
  }
  CUTE_HOST_DEVICE constexpr int32_t* added_parts(int32_t head) const {
    return counters + all_heads + head;
  }
};

// The KV head of a tile, of all sequences.
CUTE_HOST_DEVICE constexpr int32_t kv_head_of(BackwardParams const& params, WorkTile const& work) {
  return work.batch * params.heads_kv + work.head / (params.heads / params.heads_kv);
}

// Slice n of the sums of a KV head, of which there are as many as blocks of keys: tiles of all its
// query heads, one head after the other.
struct SumSlice {
  int32_t begin;
  int32_t end;
};
CUTE_HOST_DEVICE constexpr SumSlice sum_slice(int64_t tiles, int32_t n_block, int32_t n_blocks) {
  return {int32_t(tiles * n_block / n_blocks), int32_t(tiles * (n_block + 1) / n_blocks)};
}

}  // namespace cute_attention
