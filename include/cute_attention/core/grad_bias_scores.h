// core/grad_bias_scores.h: what the kernels for the gradient of a bias do to scores before they
// mask them.
#pragma once

#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/grad_bias_tiles.h"

namespace cute_attention {

// Applies the map and adds the terms. What the map leaves is not kept: its derivative is not in the
// gradient of a bias.
//   Element         of q
//   tile            scores (score_tile.h) of one head
//   has_tile        whether a tile of the bias is in shared memory: then add_tile(unit) adds it to
//                   scores in this unit. If not, its numbers are read from global memory.
template <class Element, uint32_t kScoreMods, class Tile, class AddTile>
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
    Scores::template add_terms<Element>(params, Scores::of_head(params, block.batch, block.head),
                                        tile);
  }
}

}  // namespace cute_attention
