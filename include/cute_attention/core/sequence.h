// core/sequence.h: one sequence of the batch: where its rows start, how long it is, and which keys
// a query sees.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/params.h"

namespace cute_attention {

// One sequence. No sum of its numbers overflows an int32: lengths are at most kMaxSeqlen
// (params.h), which is so much less than 2^30 that the positions of a tile that reaches past the
// end stay below 2^30, too; offsets lie between -2^30 and 2^30. So a position plus an offset fits,
// and so does the difference of two positions plus an offset.
struct Sequence {
  int32_t seqlen_q;
  int32_t seqlen_k;
  // Packed: the row of q, or of k and v, where the sequence begins. Dense: 0, as there the batch
  // stride says where it begins.
  int64_t row_q;
  int64_t row_k;
  // Query i sees the keys j with i + first_offset <= j <= i + last_offset and 0 <= j < seqlen_k.
  int32_t first_offset;
  int32_t last_offset;
};

CUTE_HOST_DEVICE constexpr int32_t min_of(int32_t a, int32_t b) { return a < b ? a : b; }
CUTE_HOST_DEVICE constexpr int32_t max_of(int32_t a, int32_t b) { return a < b ? b : a; }

CUTE_HOST_DEVICE constexpr Sequence make_sequence(int32_t seqlen_q, int32_t seqlen_k, int64_t row_q,
                                                  int64_t row_k, int32_t window_left,
                                                  int32_t window_right) {
  // Masks are aligned at the bottom right: the last query stands at the last key.
  int32_t const diagonal = seqlen_k - seqlen_q;
  // A window that reaches 2^30 - 1 keys far reaches past the end of every sequence. A wider one
  // hides no less, and its offset could overflow.
  constexpr int32_t kFarthest = (1 << 30) - 1;
  return {seqlen_q,
          seqlen_k,
          row_q,
          row_k,
          diagonal - min_of(window_left, kFarthest + diagonal),
          diagonal + min_of(window_right, kFarthest - diagonal)};
}

}  // namespace cute_attention
