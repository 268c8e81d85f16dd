// core/m_tiles.h: which tiles of queries a block of keys needs, and which of them need no mask.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// The tiles of queries that a block of keys visits: [begin, end), from the first with a query that
// sees one of the keys to the last such tile. The tiles [full_begin, full_end) hold as many queries
// as they can, and every query sees every key, so that they need no mask. An empty range has begin
// == end.
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

// The tiles of `tile_m` queries that keys [n_begin, n_begin + tile_n) of the sequence need. What
// lies past an end of the sequence must be hidden: its score is q.0 or 0.k, so that a key past the
// end could overflow exp(0 - lse) of a very negative LSE, and a query past the end has NaN for a
// key of infinity. So a block that reaches past the last key has no full tile, and a tile that
// reaches past the last query is not full.
CUTE_HOST_DEVICE constexpr MTiles m_tiles(Sequence const& sequence, int32_t n_begin, int32_t tile_n,
                                          int32_t tile_m) {
  int32_t const n_last = min_of(n_begin + tile_n, sequence.seqlen_k) - 1;
  // Queries that see some key: from the first that reaches n_begin to the last that reaches n_last.
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
  // Queries that see every key: from the first that reaches n_last to the last that reaches
  // n_begin.
  int32_t const shared_begin = max_of(n_last - sequence.last_offset, 0);
  int32_t const shared_end = min_of(n_begin - sequence.first_offset + 1, sequence.seqlen_q);
  int32_t const full_end = max_of(max_of(shared_end, 0) / tile_m, begin);
  int32_t const full_begin = min_of(ceil_div(shared_begin, tile_m), full_end);
  return {begin, max_of(full_begin, begin), full_end, end};
}

}  // namespace cute_attention
