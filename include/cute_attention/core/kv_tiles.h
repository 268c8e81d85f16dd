// core/kv_tiles.h: which KV tiles a tile of queries needs, and which of them need no mask.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/sequence.h"

namespace cute_attention {

// The KV tiles that a tile of queries visits are [begin, end). The first and the last of them have
// a key that one of the queries sees. In the tiles [full_begin, full_end) every query sees every
// key, so they need no mask. If no query sees a key, begin == end.
//
//     begin        full_begin            full_end        end
//       | left-masked  |   full (no mask)    | right-masked |
struct KvTiles {
  int32_t begin;
  int32_t full_begin;
  int32_t full_end;
  int32_t end;

  CUTE_HOST_DEVICE constexpr bool masked(int32_t n_block) const {
    return n_block >= full_end || n_block < full_begin;
  }
};

CUTE_HOST_DEVICE constexpr int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// The first key that one of the queries from m_begin on sees, if there is such a key.
CUTE_HOST_DEVICE constexpr int32_t first_visible_key(Sequence const& sequence, int32_t m_begin) {
  return max_of(m_begin + sequence.first_offset, 0);
}

// The KV tiles of `tile_n` keys that queries [m_begin, m_begin + tile_m) of the sequence need.
CUTE_HOST_DEVICE constexpr KvTiles kv_tiles(Sequence const& sequence, int32_t m_begin,
                                            int32_t tile_m, int32_t tile_n) {
  int32_t const m_last = min_of(m_begin + tile_m, sequence.seqlen_q) - 1;
  // Keys that at least one query sees: from the first key of the first query to the last key of the
  // last query.
  int32_t const key_begin = first_visible_key(sequence, m_begin);
  int32_t const key_end = min_of(m_last + sequence.last_offset + 1, sequence.seqlen_k);
  if (m_last < m_begin || key_end <= key_begin) {
    return {0, 0, 0, 0};
  }
  int32_t const begin = key_begin / tile_n;
  int32_t const end = ceil_div(key_end, tile_n);
  // Keys that every query sees: from the first key of the last query to the last key of the first
  // query.
  int32_t const shared_begin = max_of(m_last + sequence.first_offset, 0);
  int32_t const shared_end =
      max_of(min_of(m_begin + sequence.last_offset + 1, sequence.seqlen_k), 0);
  int32_t const full_end = max_of(shared_end / tile_n, begin);
  int32_t const full_begin = min_of(ceil_div(shared_begin, tile_n), full_end);
  return {begin, max_of(full_begin, begin), full_end, end};
}

// The part of `all`, the KV tiles of a tile of queries, that a warpgroup visits whose own queries
// need `own` of them. It visits all, because the warpgroups share K and V, unless only others need
// the last one: then it leaves that one out. No more than one is left out: the warpgroup does so
// while the last V of the tile of queries before is still unread, and waiting for a second V, for
// which there may be no buffer, would never end.
CUTE_HOST_DEVICE constexpr KvTiles visited_tiles(KvTiles const& all, KvTiles const& own) {
  bool const leaves_last = own.end < all.end && all.end - 1 > all.begin;
  return {all.begin, own.full_begin, own.full_end, all.end - int32_t(leaves_last)};
}

}  // namespace cute_attention
