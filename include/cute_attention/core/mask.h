// core/mask.h: hides scores: those of keys that a query does not see, and of queries that do not
// exist. A hidden score is -infinity.
#pragma once

#include "cute_attention/core/score_tile.h"

namespace cute_attention {

// Hides the keys that a query does not see, with two compares a score.
template <class Tile>
CUTE_DEVICE void mask_scores(Tile const& tile) {
  Sequence const& sequence = tile.sequence;
  CUTE_UNROLL
  for (int row = 0; row < Tile::kRows; ++row) {
    int32_t const query = tile.query(row);
    // The first and the last visible key, counted from the thread's first column, so that a score
    // costs one compare a side.
    int32_t const origin = tile.first_key(row);
    int32_t const first = query + sequence.first_offset - origin;
    int32_t const last = min_of(query + sequence.last_offset, sequence.seqlen_k - 1) - origin;
    CUTE_UNROLL
    for (int col = 0; col < Tile::kCols; ++col) {
      int32_t const key = tile.keys_behind_first(row, col);
      if (key < first || key > last) {
        tile.scores(row, col) = -INFINITY;
      }
    }
  }
}

// Hides the same keys, those behind the last visible one and those before the first one apart:
// where no key of the tile lies on a side, that side costs one branch, which all threads of the
// warp take alike. Under a causal mask a score then costs one compare.
//   hidden_score  what a hidden score becomes
template <class Tile>
CUTE_DEVICE void mask_scores_by_side(Tile const& tile, float hidden_score = -INFINITY) {
  Sequence const& sequence = tile.sequence;
  auto const hide = [&](auto const& is_hidden) {
    CUTE_UNROLL
    for (int row = 0; row < Tile::kRows; ++row) {
      auto const hidden = is_hidden(tile.query(row), tile.first_key(row));
      CUTE_UNROLL
      for (int col = 0; col < Tile::kCols; ++col) {
        if (hidden(tile.keys_behind_first(row, col))) {
          tile.scores(row, col) = hidden_score;
        }
      }
    }
  };
  int32_t const visible_to_first_query =
      min_of(tile.m_begin + sequence.last_offset + 1, sequence.seqlen_k);
  if (tile.n_begin + Tile::kTileN > visible_to_first_query) {
    hide([&](int32_t query, int32_t origin) {
      int32_t const last = min_of(query + sequence.last_offset, sequence.seqlen_k - 1) - origin;
      return [last](int32_t key) { return key > last; };
    });
  }
  int32_t const last_query = tile.m_begin + tile.packing.query(Tile::kTileM - 1);
  if (tile.n_begin < last_query + sequence.first_offset) {
    hide([&](int32_t query, int32_t origin) {
      int32_t const first = query + sequence.first_offset - origin;
      return [first](int32_t key) { return key < first; };
    });
  }
}

// Hides all keys from queries past the end of the sequence.
//   hidden_score  what a hidden score becomes
template <class Tile>
CUTE_DEVICE void mask_missing_queries(Tile const& tile, float hidden_score = -INFINITY) {
  CUTE_UNROLL
  for (int row = 0; row < Tile::kRows; ++row) {
    bool const missing = tile.query(row) >= tile.sequence.seqlen_q;
    CUTE_UNROLL
    for (int col = 0; col < Tile::kCols; ++col) {
      tile.scores(row, col) = missing ? hidden_score : tile.scores(row, col);
    }
  }
}

// Makes the numbers of queries and keys that the sequence does not have 0, whatever they are.
//   tile  gradients in the place of its scores
template <class Tile>
CUTE_DEVICE void clear_missing(Tile const& tile) {
  CUTE_UNROLL
  for (int row = 0; row < Tile::kRows; ++row) {
    bool const missing = tile.query(row) >= tile.sequence.seqlen_q;
    int32_t const keys_left = missing ? 0 : tile.sequence.seqlen_k - tile.first_key(row);
    CUTE_UNROLL
    for (int col = 0; col < Tile::kCols; ++col) {
      if (tile.keys_behind_first(row, col) >= keys_left) {
        tile.scores(row, col) = 0.f;
      }
    }
  }
}

}  // namespace cute_attention
