// core/key_splits.h: keys divided among CTAs. Where a call has few tiles of queries, most of the
// GPU would have nothing to do. So the KV tiles that a tile of queries needs are divided into
// splits, each of which another CTA computes. A split writes what it has of a row to the workspace:
//
//   o     the sum of exp(s - base) v over the keys of the split, in fp32
//   base  in base 2; no matter which number it is, as long as exp(s - base) can be computed
//   sum   the sum of exp(s - base) over the same keys; 0 where the row sees none of them, and then
//         nothing reads o and base
//
// A second kernel adds them up (core/combine_splits.h). What a row has once, a sink and the factor
// of dropout, is left to it.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/params.h"

namespace cute_attention {

CUTE_HOST_DEVICE constexpr bool has_splits(ForwardParams const& params) {
  return params.num_splits > 1;
}

// The KV tiles of one split, of all those that a tile of queries needs: an equal share of them, one
// more in the first splits where they do not divide evenly. It may be none. Which tiles need no
// mask stays as it was: some of them may lie outside.
//   share  num_splits into the number of tiles
CUTE_HOST_DEVICE constexpr KvTiles split_tiles(KvTiles const& all, int32_t split,
                                               int32_t num_splits, int32_t share) {
  int32_t const longer = all.end - all.begin - share * num_splits;
  int32_t const begin = all.begin + split * share + min_of(split, longer);
  return {begin, all.full_begin, all.full_end, begin + share + int32_t(split < longer)};
}
CUTE_HOST_DEVICE constexpr KvTiles split_tiles(KvTiles const& all, int32_t split,
                                               int32_t num_splits) {
  return split_tiles(all, split, num_splits, (all.end - all.begin) / num_splits);
}

// What a row of a split weighs.
struct SplitSum {
  float base;
  float sum;
};

// Where the workspace has row `row` of a split, counted as in the LSE (lse_index):
//   o  [num_splits, lse_size, head_dim_v], and behind it the SplitSum  [num_splits, lse_size]
CUTE_HOST_DEVICE constexpr float* split_output(ForwardParams const& params, int32_t split,
                                               int64_t row) {
  return params.split_workspace + (split * lse_size(params) + row) * params.head_dim_v;
}
CUTE_HOST_DEVICE SplitSum* split_sum(ForwardParams const& params, int32_t split, int64_t row) {
  float* const sums = split_output(params, params.num_splits, 0);
  return reinterpret_cast<SplitSum*>(sums) + split * lse_size(params) + row;
}

}  // namespace cute_attention
