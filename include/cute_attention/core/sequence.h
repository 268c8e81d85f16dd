// core/sequence.h: one sequence of the batch: where its rows start, how long it is, and which keys
// a query sees.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/params.h"

namespace cute_attention {

// Host and device. Lengths are at most kMaxSeqlen, so that positions, those of a tile that reaches
// past the end included, are below 2^30. Offsets lie between -2^30 and 2^30: a position plus an
// offset fits an int32, and so does the difference of two positions plus an offset.
struct Sequence {
  int32_t seqlen_q;
  int32_t seqlen_k;
  int64_t row_q;  // first row in a packed tensor; 0 where there is a batch stride instead
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
  int32_t const shift = seqlen_k - seqlen_q;  // causal masks are aligned at the bottom right
  // An offset of 2^30 - 1 reaches past the end of the sequence from wherever it starts: a wider
  // side needs no more.
  constexpr int32_t kFarthest = (1 << 30) - 1;
  return {seqlen_q,
          seqlen_k,
          row_q,
          row_k,
          shift - min_of(window_left, kFarthest + shift),
          shift + min_of(window_right, kFarthest - shift)};
}

}  // namespace cute_attention
