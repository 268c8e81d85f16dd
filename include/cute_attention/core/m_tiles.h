// core/m_tiles.h: which tiles of queries a block of keys needs, and which of them need no mask.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// Tiles [begin, end) hold at least one query that sees some key of the block, or lie between two
// that do. Inside it, every query of [full_begin, full_end) sees every key of the block. Empty
// ranges have begin == end.
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

// The tiles of `tile_m` queries that keys [n_begin, n_begin + tile_n) of the sequence need. A block
// that reaches past the end of the sequence has no full tile: its last keys must be hidden from
// every query, or exp(0 - lse) of a very negative LSE would overflow there.
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
  // Queries past the end of the sequence are no reason for a mask: their gradients are zeros.
  int32_t const full_end = max_of(shared_end == sequence.seqlen_q ? ceil_div(shared_end, tile_m)
                                                                  : max_of(shared_end, 0) / tile_m,
                                  begin);
  int32_t const full_begin = min_of(ceil_div(shared_begin, tile_m), full_end);
  return {begin, max_of(full_begin, begin), full_end, end};
}

}  // namespace cute_attention
