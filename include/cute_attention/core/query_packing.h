// core/query_packing.h: query heads that share a tile, because they read the same K and V.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// How the rows of a tile hold queries: row r is query r >> shift of head r % 2^shift. With shift 0
// a tile holds one head. Where the heads of a group do not fill their tiles, the last rows of each
// query are of no head.
//
//   group 3, shift 2    row     0    1    2    3  |  4    5    6    7  |  8 ...
//                       query   0    0    0    0  |  1    1    1    1  |  2
//                       head    0    1    2    -  |  0    1    2    -  |  0
struct QueryPacking {
  int32_t shift;
  int32_t group;  // query heads that read one KV head
  int32_t parts;  // tiles that the heads of a group are dealt over: ceil(group / 2^shift)

  // Queries that `rows` rows, a multiple of 2^shift, hold.
  CUTE_HOST_DEVICE constexpr int32_t queries(int32_t rows) const { return rows >> shift; }
  CUTE_HOST_DEVICE constexpr int32_t query(int32_t row) const { return row >> shift; }
  CUTE_HOST_DEVICE constexpr int32_t head(int32_t row) const { return row & ((1 << shift) - 1); }

  // Of the tiles of all heads of a sequence, heads_kv * parts of them: the first head of the
  // `index`-th, and how many it holds.
  CUTE_HOST_DEVICE constexpr int32_t first_head(int32_t index) const {
    return index / parts * group + (index % parts << shift);
  }
  CUTE_HOST_DEVICE constexpr int32_t heads(int32_t index) const {
    return min_of(group - (index % parts << shift), 1 << shift);
  }
};

// One head in a tile: row r is query r.
CUTE_HOST_DEVICE constexpr QueryPacking unpacked_queries() { return {0, 1, 1}; }

// Tiles that the queries of one KV head take. Where packed, the lengths are not known: each
// sequence leaves half of its last tile empty on average.
template <class Params>
constexpr int64_t packed_tiles(Params const& params, int32_t rows, QueryPacking const& packing) {
  int64_t const queries = packing.queries(rows);
  int64_t const longest = (params.seqlen_q + queries - 1) / queries * params.batch;
  if (params.cu_seqlens_q == nullptr) {
    return longest * packing.parts;
  }
  int64_t const mean = (params.total_q + queries - 1) / queries + params.batch / 2;
  return (mean < longest ? mean : longest) * packing.parts;
}

// The packing that takes the fewest tiles of `rows` rows, of those that most heads share the
// fewest: long sequences fill their tiles alone. At most `max_heads` heads, a power of two, share a
// tile.
template <class Params>
constexpr QueryPacking make_query_packing(Params const& params, int32_t rows, int32_t max_heads) {
  int32_t const group = params.heads / params.heads_kv;
  QueryPacking best{0, group, group};
  for (int32_t shift = 1; 1 << (shift - 1) < group && 1 << shift <= max_heads; ++shift) {
    QueryPacking const packing{shift, group, ceil_div(group, 1 << shift)};
    if (packed_tiles(params, rows, packing) < packed_tiles(params, rows, best)) {
      best = packing;
    }
  }
  return best;
}

}  // namespace cute_attention
