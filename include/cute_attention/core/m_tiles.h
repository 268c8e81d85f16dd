// core/m_tiles.h: which tiles of queries a block of keys needs, and which of them need no mask.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// The tiles of queries that a block of keys visits are [begin, end). The first and the last of them
// have a query that sees one of the keys. The tiles [full_begin, full_end) lie wholly inside the
// sequence, and each of their queries sees every key, so they need no mask. If no query sees any of
// the keys, begin == end.
struct MTiles {
  int32_t begin;
  int32_t full_begin;
  int32_t full_end;
  int32_t end;

  CUTE_HOST_DEVICE constexpr int32_t count() const { return end - begin; }
  CUTE_HOST_DEVICE constexpr bool masked(int32_t m_block) const {
    return m_block < full_begin || m_block >= full_end;
  }
};

// The tiles of `tile_m` queries that keys [n_begin, n_begin + tile_n) of the sequence need.
//
// Keys and queries past the end of the sequence are filled with zeros. The mask must hide their
// scores:
//   - A key past the end has the score 0. Where the LSE of a query is very negative, exp(0 - LSE)
//     overflows.
//   - A query past the end has the score 0 * k, which is NaN where k is infinite.
// So if the block of keys reaches past the last key, none of its tiles is full, and a tile that
// reaches past the last query is never full.
CUTE_HOST_DEVICE constexpr MTiles m_tiles(Sequence const& sequence, int32_t n_begin, int32_t tile_n,
                                          int32_t tile_m) {
  int32_t const n_last = min_of(n_begin + tile_n, sequence.seqlen_k) - 1;
  // Queries that see at least one of the keys: from the first one that sees as far as n_begin to
  // the last one that sees as far back as n_last.
  int32_t const query_begin = max_of(n_begin - sequence.last_offset, 0);
  int32_t const query_end = min_of(n_last - sequence.first_offset + 1, sequence.seqlen_q);
  if (n_last < n_begin || query_end <= query_begin) {
    return {0, 0, 0, 0};
  }
  int32_t const begin = query_begin / tile_m;
  int32_t const end = ceil_div(query_end, tile_m);
  if (n_begin + tile_n > sequence.seqlen_k) {
    return {begin, begin, begin, end};
  }
  // Queries that see every key: from the first one that sees as far as n_last to the last one that
  // sees as far back as n_begin.
  int32_t const shared_begin = max_of(n_last - sequence.last_offset, 0);
  int32_t const shared_end = min_of(n_begin - sequence.first_offset + 1, sequence.seqlen_q);
  int32_t const full_end = max_of(max_of(shared_end, 0) / tile_m, begin);
  int32_t const full_begin = min_of(ceil_div(shared_begin, tile_m), full_end);
  return {begin, max_of(full_begin, begin), full_end, end};
}

}  // namespace cute_attention
