// core/query_packing.h: query heads that share a tile, because they read the same K and V.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// How the rows of a tile hold queries. A tile holds the same queries of 2^shift heads: its row r is
// query r >> shift of head r % 2^shift. With shift 0 it holds one head. The heads that read one KV
// head form a group; where the size of a group is no multiple of 2^shift, the last tile of the
// group has rows without a head:
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

// How many tiles of `rows` rows the queries of one KV head take. The host does not know the lengths
// of packed sequences: it assumes that each leaves half of its last tile empty, which is the mean.
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

// The packing that needs the fewest tiles of `rows` rows. Where several need as few, the one that
// puts the fewest heads into a tile: the queries of a long sequence fill tiles without other
// heads'. A tile holds at most `max_heads` heads, a power of two.
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
