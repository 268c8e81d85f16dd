// core/work_tile.h: which tile of which head a CTA computes.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

struct WorkTile {
  int32_t m_block;
  int32_t head;
  int32_t batch;
};

// How many tiles all heads and sequences have: the size of a one-dimensional grid. A launch may
// have at most kMaxTiles of them, so that their indices fit an int32, as do the indices that a
// persistent grid computes in its last round.
template <class Params>
CUTE_HOST_DEVICE constexpr int64_t work_tiles(Params const& params, int32_t tile_m) {
  return tile_count(params.seqlen_q, tile_m, params.heads, params.batch);
}

// Tile `index` of them. The tiles of a head follow each other, so that CTAs that run at the same
// time read the same K and V, from L2. Within a head the last queries come first: under a causal
// mask they see the most keys, and the short tiles that are left for the end keep all SMs busy
// until it.
template <class Params>
CUTE_HOST_DEVICE constexpr WorkTile work_tile(Params const& params, int32_t tile_m, int32_t index) {
  int32_t const m_blocks = ceil_div(params.seqlen_q, tile_m);
  int32_t const head_index = index / m_blocks;
  return {m_blocks - 1 - index % m_blocks, head_index % params.heads, head_index / params.heads};
}

// One of the warps of a grid whose CTAs have `threads` threads. There may be more than 2^31 warps.
struct GridWarp {
  int64_t index;
  int64_t count;  // of the grid
};
CUTE_HOST_DEVICE constexpr GridWarp grid_warp(uint32_t cta, uint32_t ctas, uint32_t thread,
                                              uint32_t threads) {
  uint32_t const warps = threads / 32;
  return {int64_t(cta) * warps + thread / 32, int64_t(ctas) * warps};
}

// The order in which a persistent grid of CTAs takes the tiles of all heads and sequences: no
// counter in memory.
//
// Heads: the tiles of a head follow each other, so that CTAs that run at the same time read the
//   same K and V, from L2. Each round begins at the next CTA, so that the short last tiles of the
//   heads go to different CTAs.
// Pairs: as Heads, but a CTA takes two tiles of a head, the n-th from its end and then the n-th
//   from its start. Under a causal mask all such pairs cost the same.
// Longest: the last tiles of all heads, which see the most keys under a causal mask, then the last
//   but one, and so on. CTAs are served in snake order, 0 1 2 2 1 0: the one that got the longest
//   tile of a round gets the shortest of the next. This balances best, but all heads are under way
//   at once: it is for problems whose K and V all fit in L2.
enum class Order : int32_t { Heads, Pairs, Longest };

struct Schedule {
  Order order;
  int32_t tiles;
  int32_t m_blocks;
  int32_t heads;      // of one sequence
  int32_t all_heads;  // of all sequences

  // The tile that CTA `cta` of `ctas` takes in round `round`. Returns whether there is one, and
  // writes it to `work`. A CTA may have no tile in a round of Pairs and one later: `more` says
  // whether later rounds can have one.
  CUTE_HOST_DEVICE constexpr bool tile(int32_t cta, int32_t ctas, int32_t round, WorkTile& work,
                                       bool& more) const {
    if (order == Order::Pairs) {
      int32_t const pairs =
          (m_blocks + 1) / 2;  // of a head; the middle tile of an odd number is alone
      int32_t const pair = round / 2 * ctas + (cta + round / 2) % ctas;
      int32_t const head = pair / pairs;
      int32_t const near = pair % pairs, far = m_blocks - 1 - near;
      more = head < all_heads;
      work = {round % 2 == 0 ? far : near, head % heads, head / heads};
      return more && (round % 2 == 0 || near != far);
    }
    bool const backwards = order == Order::Longest && round % 2 != 0;
    int32_t const place = order == Order::Heads ? (cta + round) % ctas
                          : backwards           ? ctas - 1 - cta
                                                : cta;
    int32_t const index = round * ctas + place;
    int32_t const head = order == Order::Longest ? index % all_heads : index / m_blocks;
    int32_t const from_last = order == Order::Longest ? index / all_heads : index % m_blocks;
    more = index < tiles;
    work = {m_blocks - 1 - from_last, head % heads, head / heads};
    return more;
  }
};

// `l2_bytes` is what K and V may take of the L2 cache.
template <class Params>
constexpr Schedule make_schedule(Params const& params, int32_t tile_m, int32_t ctas,
                                 int64_t l2_bytes) {
  int32_t const m_blocks = ceil_div(params.seqlen_q, tile_m);
  int64_t const all_heads = int64_t(params.batch) * params.heads;
  // Where packed, the product counts far more than there is: it may exceed 64 bits.
  double const kv_bytes = 2.0 * params.batch * params.heads_kv * params.seqlen_k *
                          (int64_t(params.head_dim) + params.head_dim_v);
  bool const uneven =
      params.window_right < params.seqlen_k && params.window_left >= params.seqlen_k;
  int64_t const pairs = (m_blocks + 1) / 2 * all_heads;
  int64_t const rounds = (pairs + ctas - 1) / ctas;
  bool const pairs_fill = 10 * pairs > 9 * rounds * ctas;
  Order const order = !uneven                                     ? Order::Heads
                      : kv_bytes > double(l2_bytes) && pairs_fill ? Order::Pairs
                                                                  : Order::Longest;
  // Of packed sequences there may be more tiles in name, each sequence counted as the longest.
  int64_t const tiles = work_tiles(params, tile_m);
  return {order, int32_t(tiles < kMaxTiles ? tiles : kMaxTiles), m_blocks, params.heads,
          int32_t(all_heads)};
}

}  // namespace cute_attention
