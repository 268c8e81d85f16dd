// core/grad_bias_tiles.h: which scores add to a tile of the gradient of a bias, and which CTA
// visits them.
//
// The gradient of a bias is the gradient of the scores, summed over the dimensions in which the
// bias has one number for all. A tile of the gradient is the sum of some tiles of scores:
//
//   one     where nothing is summed. A CTA then has a run of tiles of the gradient that lie side by
//           side, so that it reads their queries once.
//   several A CTA has one tile of the gradient, and visits one after the other, in a fixed order,
//           the tiles of scores whose sum it is. Where there are fewer such tiles than CTAs that
//           can run, the visits are divided into parts. Each part has a CTA of its own, which
//           writes its sum to the workspace; another kernel adds up the parts.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/params.h"

namespace cute_attention {

// How many indices of a dimension of the gradient there are: 1 where it is summed.
CUTE_HOST_DEVICE constexpr int32_t kept_extent(int64_t stride, int32_t extent) {
  return stride == 0 ? 1 : extent;
}

// The rows and columns of a tile.
struct TileShape {
  int32_t m;
  int32_t n;
};

// A tile of scores of one head of one sequence.
struct ScoreBlock {
  int32_t batch;
  int32_t head;
  int32_t m_block;
  int32_t n_block;
};

// The tiles of scores in a launch, or the tiles of the gradient.
struct BlockGrid {
  int32_t batch;
  int32_t heads;
  int32_t m_blocks;
  int32_t n_blocks;

  // Where 64 bits cannot hold it, some number above kMaxTiles.
  CUTE_HOST_DEVICE constexpr int64_t count() const {
    int64_t const rows_of_tiles = tile_count(m_blocks, 1, heads, batch);
    return rows_of_tiles > kMaxTiles && n_blocks > 0 ? rows_of_tiles : rows_of_tiles * n_blocks;
  }

  // Number `index` of them. Neighbours lie side by side.
  CUTE_HOST_DEVICE constexpr ScoreBlock block(int64_t index) const {
    int64_t const row_of_tiles = index / n_blocks;
    int64_t const batch_head = row_of_tiles / m_blocks;
    return {int32_t(batch_head / heads), int32_t(batch_head % heads),
            int32_t(row_of_tiles % m_blocks), int32_t(index % n_blocks)};
  }
};

CUTE_HOST_DEVICE constexpr BlockGrid score_grid(BackwardParams const& params, TileShape tile) {
  return {params.batch, params.heads, ceil_div(params.seqlen_q, tile.m),
          ceil_div(params.seqlen_k, tile.n)};
}

CUTE_HOST_DEVICE constexpr BlockGrid grad_bias_grid(BackwardParams const& params, TileShape tile) {
  BiasTensor const& grad = params.grad_bias;
  BlockGrid const scores = score_grid(params, tile);
  return {kept_extent(grad.batch_stride, scores.batch), kept_extent(grad.head_stride, scores.heads),
          kept_extent(grad.row_stride, scores.m_blocks),
          kept_extent(grad.col_stride, scores.n_blocks)};
}

// The numbers of a tile of the gradient: one column where keys are summed, one row where queries
// are.
CUTE_HOST_DEVICE constexpr TileShape grad_bias_shape(BiasTensor const& grad, TileShape tile) {
  return {kept_extent(grad.row_stride, tile.m), kept_extent(grad.col_stride, tile.n)};
}

// How a launch divides the gradient among its CTAs.
struct GradBiasSchedule {
  bool sums;      // a tile of the gradient is the sum of several tiles of scores
  int32_t run;    // tiles of the gradient that a CTA has side by side; 1 where they are sums
  int32_t parts;  // CTAs among which the visits of a tile are divided; 1 where it is no sum
  int32_t group;  // query heads of a KV head
};

// The tiles of scores that a CTA visits.
struct GradBiasWork {
  ScoreBlock first;
  int64_t count;
};

// The tiles of scores of a tile of the gradient, of which there is one at least.
CUTE_HOST_DEVICE constexpr BlockGrid visits_of_tile(BlockGrid const& scores,
                                                    BlockGrid const& grad) {
  return {scores.batch / grad.batch, scores.heads / grad.heads, scores.m_blocks / grad.m_blocks,
          scores.n_blocks / grad.n_blocks};
}

// The runs of tiles that the CTAs of a launch have, one each.
CUTE_HOST_DEVICE constexpr BlockGrid runs_of_tiles(BlockGrid const& grad, int32_t run) {
  return {grad.batch, grad.heads, grad.m_blocks, ceil_div(grad.n_blocks, run)};
}

CUTE_HOST_DEVICE constexpr int64_t grad_bias_ctas(BlockGrid const& grad,
                                                  GradBiasSchedule const& schedule) {
  return runs_of_tiles(grad, schedule.run).count() * schedule.parts;
}

// What CTA number `index` visits where the tiles of the gradient are no sums: those of a run.
CUTE_HOST_DEVICE constexpr GradBiasWork work_of_run(BlockGrid const& grad, int32_t run,
                                                    int64_t index) {
  ScoreBlock first = runs_of_tiles(grad, run).block(index);
  first.n_block *= run;
  return {first, min_of(run, grad.n_blocks - first.n_block)};
}

// What CTA number `index` visits where they are sums: a part of the visits of a tile. CTAs of the
// same part, and so of the same sequences, are neighbours. Parts whose number of visits is larger
// by one come first.
CUTE_HOST_DEVICE constexpr GradBiasWork work_of_part(BlockGrid const& scores, BlockGrid const& grad,
                                                     int32_t parts, int64_t index) {
  int64_t const tiles = grad.count(), part = index / tiles;
  ScoreBlock first = grad.block(index % tiles);
  BlockGrid const visits = visits_of_tile(scores, grad);
  int64_t const each = visits.count() / parts, larger = visits.count() % parts;
  int64_t const count = each + int64_t(part < larger);
  if (count > 0) {
    int64_t const begin = part * each + (part < larger ? part : larger);
    int64_t const heads_done = begin / visits.heads, keys_done = heads_done / visits.n_blocks;
    first.head += int32_t(begin % visits.heads);
    first.n_block += int32_t(heads_done % visits.n_blocks);
    first.m_block += int32_t(keys_done % visits.m_blocks);
    first.batch += int32_t(keys_done / visits.m_blocks);
  }
  return {first, count};
}

// Moves to the next visit of a part. Heads are visited first: those of a group have one K and V. It
// takes the extents from params, so that the kernel holds no registers for them.
CUTE_HOST_DEVICE constexpr void advance_visit(BackwardParams const& params, TileShape tile,
                                              ScoreBlock& block) {
  BiasTensor const& grad = params.grad_bias;
  if (grad.head_stride == 0) {
    if (++block.head < params.heads) {
      return;
    }
    block.head = 0;
  }
  if (grad.col_stride == 0) {
    if (++block.n_block < ceil_div(params.seqlen_k, tile.n)) {
      return;
    }
    block.n_block = 0;
  }
  if (grad.row_stride == 0) {
    if (++block.m_block < ceil_div(params.seqlen_q, tile.m)) {
      return;
    }
    block.m_block = 0;
  }
  ++block.batch;
}

// The most numbers of a workspace of parts: 32 MB.
constexpr int64_t kMaxGradBiasParts = int64_t(1) << 23;

// Numbers of all tiles of the gradient together, of one part.
constexpr int64_t grad_bias_part_numbers(BackwardParams const& params, TileShape tile) {
  TileShape const shape = grad_bias_shape(params.grad_bias, tile);
  return grad_bias_grid(params, tile).count() * shape.m * shape.n;
}

// The schedule of a launch in which `ctas` CTAs run at the same time where they compute sums, and
// up to twice as many where they do not.
//
// Runs are as long as leaves eight CTAs for each that runs at the same time: under a mask some end
// early, and others take their place.
//
// A part takes as long as its visits and two more: the first waits for its copies, and the last
// writes the sum. The tiles of the gradient are alike, so a launch takes a whole number of rounds.
constexpr GradBiasSchedule grad_bias_schedule(BackwardParams const& params, TileShape tile,
                                              int64_t ctas) {
  BlockGrid const grad = grad_bias_grid(params, tile);
  int64_t const tiles = grad.count();
  if (tiles == 0 || tiles > kMaxTiles) {
    return {true, 1, 1, 1};
  }
  int32_t const group = params.heads / params.heads_kv;
  int64_t const visits = visits_of_tile(score_grid(params, tile), grad).count();
  if (visits == 1 && params.grad_bias.row_stride != 0 && params.grad_bias.col_stride != 0) {
    int64_t const run = tiles / (16 * ctas);
    return {false, run < 1 ? 1 : run > grad.n_blocks ? grad.n_blocks : int32_t(run), 1, group};
  }
  constexpr int64_t kOverhead = 2;
  int64_t const room = kMaxGradBiasParts / grad_bias_part_numbers(params, tile);
  int64_t const most = room < visits ? room : visits;
  int64_t best = 1, least = (tiles + ctas - 1) / ctas * (visits + kOverhead);
  for (int64_t rounds = 1; rounds <= 4; ++rounds) {
    int64_t const filling = rounds * ctas / tiles, parts = filling < most ? filling : most;
    if (parts <= 1) {
      continue;
    }
    int64_t const time =
        (tiles * parts + ctas - 1) / ctas * ((visits + parts - 1) / parts + kOverhead);
    if (time < least) {
      best = parts;
      least = time;
    }
  }
  return {true, 1, int32_t(best), group};
}

}  // namespace cute_attention
