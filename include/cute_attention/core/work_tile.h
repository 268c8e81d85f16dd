// core/work_tile.h: which tile of which head a CTA computes.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

struct WorkTile {
  int32_t m_block;
  int32_t head;
  int32_t batch;
};

// Tiles of all heads and sequences, as the size of a one-dimensional grid.
template <class Params>
CUTE_HOST_DEVICE constexpr int64_t work_tiles(Params const& params, int32_t tile_m) {
  return int64_t(ceil_div(params.seqlen_q, tile_m)) * params.heads * params.batch;
}

// Tile `index` of them. The tiles of a head follow each other, so that CTAs that run together share
// its K and V in L2; the last queries, which see most keys under a causal mask, come first, so that
// the short tiles fill the tail.
template <class Params>
CUTE_HOST_DEVICE constexpr WorkTile work_tile(Params const& params, int32_t tile_m, int32_t index) {
  int32_t const m_blocks = ceil_div(params.seqlen_q, tile_m);
  int32_t const head_index = index / m_blocks;
  return {m_blocks - 1 - index % m_blocks, head_index % params.heads, head_index / params.heads};
}

// Where the LSE of a head begins: [batch, heads, seqlen_q], or packed [heads, total_q].
template <class Params>
CUTE_HOST_DEVICE constexpr int64_t lse_offset(Params const& params, WorkTile const& work,
                                              Sequence const& sequence) {
  return params.cu_seqlens_q == nullptr
             ? (int64_t(work.batch) * params.heads + work.head) * params.seqlen_q
             : work.head * params.total_q + sequence.row_q;
}

}  // namespace cute_attention
