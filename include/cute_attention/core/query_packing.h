// core/query_packing.h: puts several query heads into one tile, where they read the same K and V.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// Which query and which head each row of a tile holds. A tile holds the same queries of 2^shift
// heads: row r holds query r >> shift of head r % 2^shift, both counted from the first of the tile.
// With shift 0 a tile holds one head. The heads that read one KV head form a group. If the size of
// the group is not a multiple of 2^shift, its last tile has rows that hold no head:
//
//   group 3, shift 2    row     0    1    2    3  |  4    5    6    7  |  8 ...
//                       query   0    0    0    0  |  1    1    1    1  |  2
//                       head    0    1    2    -  |  0    1    2    -  |  0
struct QueryPacking {
  int32_t shift;
  int32_t group;  // query heads that read one KV head
  int32_t parts;  // how many tiles the heads of a group take: ceil(group / 2^shift)

  // How many queries of each head `rows` rows hold; `rows` is a multiple of 2^shift.
  CUTE_HOST_DEVICE constexpr int32_t queries(int32_t rows) const { return rows >> shift; }
  CUTE_HOST_DEVICE constexpr int32_t query(int32_t row) const { return row >> shift; }
  CUTE_HOST_DEVICE constexpr int32_t head(int32_t row) const { return row & ((1 << shift) - 1); }

  // The first head of part `part` of a group, counted from the first of the group, and how many
  // heads the part has.
  CUTE_HOST_DEVICE constexpr int32_t head_of_group(int32_t part) const { return part << shift; }
  CUTE_HOST_DEVICE constexpr int32_t heads_of_part(int32_t part) const {
    return min_of(group - head_of_group(part), 1 << shift);
  }

  // The heads of a sequence take heads_kv * parts tiles for the same queries. These functions say
  // which head is the first in the tile number `index`, the number of the tile with that first
  // head, and how many heads a tile holds. They divide, which takes long where parts > 1.
  CUTE_HOST_DEVICE constexpr int32_t first_head(int32_t index) const {
    return parts == 1 ? index * group : index / parts * group + head_of_group(index % parts);
  }
  CUTE_HOST_DEVICE constexpr int32_t index(int32_t first_head) const {
    return first_head / group * parts + (first_head % group >> shift);
  }
  CUTE_HOST_DEVICE constexpr int32_t heads(int32_t index) const {
    return heads_of_part(parts == 1 ? 0 : index % parts);
  }
};

// The packing with one head in a tile: row r holds query r.
CUTE_HOST_DEVICE constexpr QueryPacking unpacked_queries() { return {0, 1, 1}; }

// How many tiles of `rows` rows the queries of one KV head take, over the whole batch. The host
// does not know the lengths of packed sequences. It assumes that each of them leaves half of its
// last tile empty, as sequences of random lengths do on average.
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

// Returns the packing that needs the fewest tiles of `rows` rows. If several packings need equally
// few, it is the one with the fewest heads in a tile: the queries of one head of a long sequence
// fill its tiles, and there is nothing to gain. A tile holds at most `max_heads` heads, which is a
// power of two.
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
