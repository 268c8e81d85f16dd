// core/few_queries.h: calls with few queries. An sm80 row with tiles of 128 queries has a second
// kernel for them, with half as many rows in a tile, which the query heads that read one KV head
// share.
//
// With one query in a tile of 128 rows, products take about as long as reading K and V does, and
// the tile's few warps do one after the other. Tiles of half the size take half of the products,
// and more CTAs, each with a copy under way, have room on an SM. NVIDIA H100, 1 x 32k keys, 32
// heads over 8 of 128: one query 58 us instead of 78, 16 queries 66 instead of 251.
#pragma once

#include "cute_attention/config.h"
#include "cute_attention/params.h"

namespace cute_attention {

constexpr int32_t kFewQueriesTileM = 64;

// Whether a row has such a kernel. What modifies scores may depend on the head, so rows that modify
// them have none.
constexpr bool has_few_queries_kernel(KernelKey const& key, KernelConfig const& config) {
  return key.arch == Arch::Sm80 && key.direction == Direction::Forward &&
         key.score_mods == score_mods::None && config.tile_m == 2 * kFewQueriesTileM &&
         config.warps % 4 == 0;
}

// The tile of that kernel. A warp has as many rows as before.
constexpr KernelConfig few_queries_config(KernelConfig config) {
  config.tile_m /= 2;
  config.warps /= 2;
  return config;
}

// Whether a call on such a row takes that kernel: the queries of a head fit in one of its tiles. A
// call whose bits may not depend on the number of queries has the same kernel for all numbers.
//   params  as with_groups_as_queries() tells it
constexpr bool takes_few_queries_kernel(ForwardParams const& params) {
  return params.seqlen_q <= kFewQueriesTileM && params.batch_invariant == 0;
}

}  // namespace cute_attention
