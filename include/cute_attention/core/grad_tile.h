// core/grad_tile.h: which block of keys a CTA of the backward pass computes, and where the blocks
// of its dQ sums lie.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention {

struct GradTile {
  int32_t n_block;
  int32_t head_kv;
  int32_t batch;
};

// The order in which CTAs take the blocks of keys of all heads and sequences.
//
// Heads form groups whose queries and dQ sums stay in L2 together. Within a group the first keys,
// which most queries see under a causal mask, come first: the short blocks fill the tail. A CTA
// waits for none but earlier ones, those with lower n_block: where dQ is summed in order, that is
// the order.
struct GradSchedule {
  int32_t n_blocks;
  int32_t heads_kv;         // of one sequence
  int32_t all_heads;        // kv heads of all sequences
  int32_t heads_per_group;  // of all_heads

  // At most kMaxTiles, as work_tiles().
  CUTE_HOST_DEVICE constexpr int64_t tiles() const { return int64_t(n_blocks) * all_heads; }

  CUTE_HOST_DEVICE constexpr GradTile tile(int32_t index) const {
    int32_t const tiles_per_group = n_blocks * heads_per_group;
    int32_t const first_head = index / tiles_per_group * heads_per_group;
    int32_t const heads_here = min_of(heads_per_group, all_heads - first_head);
    int32_t const in_group = index % tiles_per_group;
    int32_t const head = first_head + in_group % heads_here;
    return {in_group / heads_here, head % heads_kv, head / heads_kv};
  }
};

// `l2_bytes` is what a group may take of the L2 cache, `ctas` how many CTAs run together. Where dQ
// is summed in order, CTAs of one head follow each other a step apart: a group has so many heads
// that few of them run together, four and one more for every 16 steps. Measured on an H200 at head
// dim 256, 512 tokens, in order: 133 heads of 1 MB a group take 1.44 of the time out of order, 33
// heads 1.09.
constexpr GradSchedule make_grad_schedule(BackwardParams const& params, int32_t tile_m,
                                          int32_t tile_n, int64_t l2_bytes, int64_t ctas) {
  // Q and dO in 16 bits, dQ's sums in 32.
  int64_t const head_bytes = int64_t(params.seqlen_q) * (params.heads / params.heads_kv) *
                             (6 * params.head_dim + 2 * params.head_dim_v);
  int64_t const all_heads = int64_t(params.batch) * params.heads_kv;
  int64_t const fitting = l2_bytes / (head_bytes > 0 ? head_bytes : 1);
  int64_t const steps = ceil_div(params.seqlen_q, tile_m);
  int64_t const least = params.grad_q_turn == nullptr ? 1 : ctas / (4 + steps / 16) + 1;
  int64_t const wanted = fitting > least ? fitting : least;
  // Even groups: with 64 heads in groups of 7 the last, of one head, would leave most of the chip
  // idle.
  int64_t const groups = all_heads > wanted ? all_heads / wanted : 1;
  return {ceil_div(params.seqlen_k, tile_n), params.heads_kv, int32_t(all_heads),
          int32_t((all_heads + groups - 1) / groups)};
}

// Queries of all heads and sequences: the size of the LSE.
CUTE_HOST_DEVICE constexpr int64_t lse_size(BackwardParams const& params) {
  return params.heads * (params.cu_seqlens_q == nullptr ? int64_t(params.batch) * params.seqlen_q
                                                        : params.total_q);
}

// The number of blocks of dQ sums: one for each tile of queries of each head. A packed sequence
// begins at a block of its own: sequence b of a head at block (cu_seqlens_q[b] + b * tile_m) /
// tile_m of that head.
constexpr int64_t grad_q_blocks(BackwardParams const& params, int32_t tile_m) {
  int64_t const blocks_of_a_head =
      params.cu_seqlens_q == nullptr
          ? int64_t(params.batch) * ((params.seqlen_q + tile_m - 1) / tile_m)
          : (params.total_q + int64_t(params.batch) * tile_m) / tile_m;
  return blocks_of_a_head * params.heads;
}

// The workspaces of a backward pass that computes `delta` for each query and sums dQ in blocks:
//
//   delta        [2, lse_size]               grad_lse - rowsum(grad_o * o), then LSE * log2(e)
//   grad_q_sum   [blocks, tile_m, head_dim]  the sums
//   grad_q_turn  [blocks]                    which CTA adds next, where the order matters
constexpr BackwardWorkspace grad_workspace(BackwardParams const& params, int32_t tile_m,
                                           int32_t head_dim) {
  int64_t const blocks = grad_q_blocks(params, tile_m);
  return {2 * lse_size(params), blocks * tile_m * head_dim, blocks};
}

// The block of dQ sums of tile 0 of a head of a sequence; the others follow.
CUTE_HOST_DEVICE constexpr int64_t first_grad_q_block(BackwardParams const& params,
                                                      Sequence const& sequence, int32_t batch,
                                                      int32_t head, int32_t tile_m) {
  if (params.cu_seqlens_q == nullptr) {
    return (int64_t(batch) * params.heads + head) * ceil_div(params.seqlen_q, tile_m);
  }
  return head * (grad_q_blocks(params, tile_m) / params.heads) +
         (sequence.row_q + int64_t(batch) * tile_m) / tile_m;
}

}  // namespace cute_attention
