// core/mask.h: hides the scores of keys that a query does not see.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// Sets scores of hidden keys to -infinity.
//   scores  (ROWS, COLS)  this thread's scores
//   coords  (ROWS, COLS)  their (row, column) in the tile
template <class Scores, class Coords>
CUTE_DEVICE void mask_scores(Scores& scores, Coords const& coords, Sequence const& sequence,
                             int32_t m_begin, int32_t n_begin) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(scores) == size<0>(coords));
  CUTE_STATIC_ASSERT_V(size<1>(scores) == size<1>(coords));
  CUTE_UNROLL
  for (int row = 0; row < size<0>(scores); ++row) {
    int32_t const query = m_begin + int32_t(get<0>(coords(row, 0)));
    // The visible interval, relative to this thread's first column, so that a score costs one
    // compare a side.
    int32_t const origin = n_begin + int32_t(get<1>(coords(row, 0)));
    int32_t const first = query + sequence.first_offset - origin;
    int32_t const last = min_of(query + sequence.last_offset, sequence.seqlen_k - 1) - origin;
    CUTE_UNROLL
    for (int col = 0; col < size<1>(scores); ++col) {
      int32_t const key = int32_t(get<1>(coords(row, col))) - int32_t(get<1>(coords(row, 0)));
      if (key < first || key > last) {
        scores(row, col) = -INFINITY;
      }
    }
  }
}

// As mask_scores, one side of the visible interval after the other: a side that hides nothing in
// the tile of kRows x kCols costs a branch, and under a causal mask a score costs one compare. The
// branches are the same for the whole warp.
template <int kRows, int kCols, class Scores, class Coords>
CUTE_DEVICE void mask_scores_by_side(Scores& scores, Coords const& coords, Sequence const& sequence,
                                     int32_t m_begin, int32_t n_begin,
                                     QueryPacking const& packing) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(scores) == size<0>(coords));
  CUTE_STATIC_ASSERT_V(size<1>(scores) == size<1>(coords));
  auto const hide = [&](auto const& is_hidden) {
    CUTE_UNROLL
    for (int row = 0; row < size<0>(scores); ++row) {
      int32_t const query = m_begin + packing.query(int32_t(get<0>(coords(row, 0))));
      int32_t const origin = n_begin + int32_t(get<1>(coords(row, 0)));
      auto const hidden = is_hidden(query, origin);
      CUTE_UNROLL
      for (int col = 0; col < size<1>(scores); ++col) {
        if (hidden(int32_t(get<1>(coords(row, col))) - int32_t(get<1>(coords(row, 0))))) {
          scores(row, col) = -INFINITY;
        }
      }
    }
  };
  if (n_begin + kCols > min_of(m_begin + sequence.last_offset + 1, sequence.seqlen_k)) {
    hide([&](int32_t query, int32_t origin) {
      int32_t const last = min_of(query + sequence.last_offset, sequence.seqlen_k - 1) - origin;
      return [last](int32_t key) { return key > last; };
    });
  }
  if (n_begin < m_begin + packing.query(kRows - 1) + sequence.first_offset) {
    hide([&](int32_t query, int32_t origin) {
      int32_t const first = query + sequence.first_offset - origin;
      return [first](int32_t key) { return key < first; };
    });
  }
}

// Sets scores of queries past the end of the sequence to -infinity.
//   scores  (QUERIES, KEYS)  this thread's scores
//   coords  (QUERIES, KEYS)  their (query, key) in the tile
template <class Scores, class Coords>
CUTE_DEVICE void mask_missing_queries(Scores& scores, Coords const& coords,
                                      Sequence const& sequence, int32_t m_begin) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(scores) == size<0>(coords));
  CUTE_STATIC_ASSERT_V(size<1>(scores) == size<1>(coords));
  CUTE_UNROLL
  for (int query = 0; query < size<0>(scores); ++query) {
    bool const missing = m_begin + int32_t(get<0>(coords(query, 0))) >= sequence.seqlen_q;
    CUTE_UNROLL
    for (int key = 0; key < size<1>(scores); ++key) {
      scores(query, key) = missing ? -INFINITY : scores(query, key);
    }
  }
}

}  // namespace cute_attention
