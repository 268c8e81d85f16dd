// core/grad_bias_scores.h: what the kernels for the gradient of a bias do to scores before they
// mask them.
#pragma once

#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/grad_bias_tiles.h"
#include "cute_attention/core/opaque.h"

namespace cute_attention {

// Applies the map and adds the terms. What the map leaves is not kept: its derivative is not in the
// gradient of a bias.
//   Element         of q
//   tile            scores (score_tile.h) of one head
//   has_tile        whether a tile of the bias is in shared memory: then add_tile(unit) adds it to
//                   scores in this unit. If not, its numbers are read from global memory.
//   kAtOnce         of how many of the thread's columns they are read at a time, where registers do
//                   not hold those of all; 0 where they do
template <class Element, int kAtOnce = 0, uint32_t kScoreMods, class Tile, class AddTile>
CUTE_DEVICE void modify_scores(BackwardParams const& params,
                               BackwardScores<kScoreMods> const& scores, ScoreBlock const& block,
                               Tile const& tile, bool has_tile, AddTile const& add_tile) {
  using Scores = BackwardScores<kScoreMods>;
  using OtherScores = BackwardScores<kScoreMods, score_mods::Bias>;  // with all terms but the bias
  static_assert(Scores::kTermsInScores, "the bias is added to scores");
  scores.modifiers.template map<1>(tile.scores, scores.all_near(tile.scores));
  if (has_tile) {
    add_tile(Scores::Modifiers::exponent_scale(params));
    OtherScores::template add_terms<Element>(
        params, OtherScores::of_head(params, block.batch, block.head), tile);
  } else {
    auto const head = Scores::of_head(params, block.batch, block.head);
    if constexpr (kAtOnce == 0) {
      Scores::template add_terms<Element>(params, head, tile);
    } else {
      uint32_t zero = 0;
      CUTE_UNROLL
      for (int col = 0; col < Tile::kCols; col += kAtOnce) {
        Scores::template add_terms<Element>(
            params, head, columns_of_scores<kAtOnce>(tile, col, tile.n_begin + int32_t(zero)));
        // The next addresses cannot be known before these scores are computed. A square has no
        // sign.
        float const last = tile.scores(Tile::kRows - 1, col + kAtOnce - 1);
        zero = zero_after(last * last);
      }
    }
  }
}

}  // namespace cute_attention
