// core/grad_bias_walk.h: how a CTA of a kernel for the gradient of a bias goes through tiles of
// scores: past those of which no query sees a key.
#pragma once

#include "cute_attention/core/grad_bias_tiles.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/opaque.h"

namespace cute_attention {

//   kSums  whether tiles of the gradient are sums of tiles of scores
template <int kTileM, int kTileN, bool kSums>
struct GradBiasWalk {
  static constexpr TileShape kTile{kTileM, kTileN};

  // A tile of scores, and how many visits are left, this one included.
  struct Visit {
    ScoreBlock block;
    int64_t left;
  };
  // Which operands a tile does not share with the one before it.
  struct Changes {
    bool queries;
    bool keys;
  };

  BackwardParams const& params;
  GradBiasSchedule const& schedule;

  // What CTA number `index` of a launch visits.
  CUTE_DEVICE GradBiasWork work(int64_t index) const {
    BlockGrid const grad = grad_bias_grid(params, kTile);
    if constexpr (kSums) {
      return work_of_part(score_grid(params, kTile), grad, schedule.parts, index);
    } else {
      return work_of_run(grad, schedule.run, index);
    }
  }

  // The same block. What is computed from it, addresses and lengths, is computed where it is used,
  // and holds no registers during the products (opaque.h).
  CUTE_DEVICE static ScoreBlock here(ScoreBlock const& block) {
    return {opaque(block.batch), opaque(block.head), opaque(block.m_block), opaque(block.n_block)};
  }

  // Whether a query of the tile sees one of its keys.
  CUTE_DEVICE bool is_visible(ScoreBlock const& block) const {
    KvTiles const tiles =
        kv_tiles(load_sequence(params, block.batch), block.m_block * kTileM, kTileM, kTileN);
    return tiles.begin <= block.n_block && block.n_block < tiles.end;
  }

  // Moves to the next tile, whether it is visible or not. Returns false after the last.
  CUTE_DEVICE bool move(Visit& visit) const {
    bool const more = --visit.left > 0;
    if (more) {
      if constexpr (kSums) {
        advance_visit(params, kTile, visit.block);
      } else {
        ++visit.block.n_block;
      }
    }
    return more;
  }

  CUTE_DEVICE int32_t head_kv(ScoreBlock const& block) const {
    int32_t const group = schedule.group;
    return group == 1 ? block.head : block.head / group;
  }

  CUTE_DEVICE Changes changes(ScoreBlock const& from, ScoreBlock const& to) const {
    if constexpr (kSums) {
      return {from.batch != to.batch || from.head != to.head || from.m_block != to.m_block,
              from.batch != to.batch || head_kv(from) != head_kv(to) || from.n_block != to.n_block};
    } else {
      return {false, true};
    }
  }
};

}  // namespace cute_attention
