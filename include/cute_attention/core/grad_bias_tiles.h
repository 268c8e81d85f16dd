// core/grad_bias_tiles.h: which scores add to a tile of the gradient of a bias.
//
// The gradient of a bias is the gradient of the scores, summed over the dimensions in which the
// bias has one number for all. A CTA has one tile of the gradient, and visits one after the other,
// in a fixed order, the tiles of scores whose sum it is.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/params.h"

namespace cute_attention {

// How many indices of a dimension of the gradient there are: 1 where it is summed.
CUTE_HOST_DEVICE constexpr int32_t kept_extent(int64_t stride, int32_t extent) {
  return stride == 0 ? 1 : extent;
}

// The tiles of the gradient in a launch.
struct GradBiasGrid {
  int32_t batch;
  int32_t heads;
  int32_t m_blocks;
  int32_t n_blocks;

  // Where 64 bits cannot hold it, some number above kMaxTiles.
  constexpr int64_t ctas() const {
    int64_t const rows_of_tiles = tile_count(m_blocks, 1, heads, batch);
    return rows_of_tiles > kMaxTiles && n_blocks > 0 ? rows_of_tiles : rows_of_tiles * n_blocks;
  }
};

CUTE_HOST_DEVICE constexpr GradBiasGrid grad_bias_grid(BackwardParams const& params, int32_t tile_m,
                                                       int32_t tile_n) {
  BiasTensor const& grad = params.grad_bias;
  return {kept_extent(grad.batch_stride, params.batch), kept_extent(grad.head_stride, params.heads),
          kept_extent(grad.row_stride, ceil_div(params.seqlen_q, tile_m)),
          kept_extent(grad.col_stride, ceil_div(params.seqlen_k, tile_n))};
}

// A tile of scores of one head of one sequence.
struct ScoreBlock {
  int32_t batch;
  int32_t head;
  int32_t m_block;
  int32_t n_block;
};

// The tiles of scores that a CTA visits are [first, end) in each of the four dimensions. Heads are
// visited first: those of a group have one K and V.
struct GradBiasTiles {
  ScoreBlock first;
  ScoreBlock end;

  // Moves to the next one. Returns false after the last.
  CUTE_HOST_DEVICE constexpr bool advance(ScoreBlock& block) const {
    if (++block.head < end.head) {
      return true;
    }
    block.head = first.head;
    if (++block.n_block < end.n_block) {
      return true;
    }
    block.n_block = first.n_block;
    if (++block.m_block < end.m_block) {
      return true;
    }
    block.m_block = first.m_block;
    return ++block.batch < end.batch;
  }
};

// What CTA number `index` visits. Neighbouring CTAs have tiles of the same rows, and so read the
// same queries.
CUTE_HOST_DEVICE constexpr GradBiasTiles grad_bias_tiles(BackwardParams const& params,
                                                         int32_t tile_m, int32_t tile_n,
                                                         int64_t index) {
  BiasTensor const& grad = params.grad_bias;
  GradBiasGrid const grid = grad_bias_grid(params, tile_m, tile_n);
  int32_t const n_block = int32_t(index % grid.n_blocks);
  int64_t const row_of_tiles = index / grid.n_blocks;
  int32_t const m_block = int32_t(row_of_tiles % grid.m_blocks);
  int64_t const batch_head = row_of_tiles / grid.m_blocks;
  int32_t const head = int32_t(batch_head % grid.heads);
  int32_t const batch = int32_t(batch_head / grid.heads);
  return {{batch, head, m_block, n_block},
          {grad.batch_stride == 0 ? params.batch : batch + 1,
           grad.head_stride == 0 ? params.heads : head + 1,
           grad.row_stride == 0 ? ceil_div(params.seqlen_q, tile_m) : m_block + 1,
           grad.col_stride == 0 ? ceil_div(params.seqlen_k, tile_n) : n_block + 1}};
}

}  // namespace cute_attention
