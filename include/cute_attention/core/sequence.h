// core/sequence.h: one sequence of the batch: where its rows start, how long it is, and which keys
// a query sees.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/params.h"

namespace cute_attention {

// One sequence. Kernels may add its numbers in 32 bits. A length is at most kMaxSeqlen (params.h),
// which is kMaxTile less than 2^30, so all positions in a tile that reaches past the end of the
// sequence are still below 2^30. The offsets lie between -2^30 and 2^30. So neither a position plus
// an offset nor the difference of two positions plus an offset overflows an int32.
struct Sequence {
  int32_t seqlen_q;
  int32_t seqlen_k;
  // The row of q, and the row of k and v, where a packed sequence begins; in a cache, how many rows
  // are padding. Otherwise 0: there the batch stride says where a sequence begins.
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
  // Masks are aligned at the bottom right: query i stands at key i + diagonal, so the last query
  // stands at the last key.
  int32_t const diagonal = seqlen_k - seqlen_q;
  // With a first_offset of -(2^30 - 1) even the last query of the longest sequence sees key 0, and
  // with a last_offset of 2^30 - 1 query 0 sees the last key. A wider window would show no more
  // keys, but its offset could overflow, so the offsets end there.
  constexpr int32_t kFarthest = (1 << 30) - 1;
  return {seqlen_q,
          seqlen_k,
          row_q,
          row_k,
          diagonal - min_of(window_left, kFarthest + diagonal),
          diagonal + min_of(window_right, kFarthest - diagonal)};
}

}  // namespace cute_attention
