// core/work_tile.h: the tiles of queries of all heads and sequences, and the order in which CTAs
// compute them.
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

// How many tiles all heads and sequences have together: the size of a one-dimensional grid. A
// launch may have at most kMaxTiles. Then the index of every tile fits an int32, and so does every
// index that a persistent grid computes in its last round.
template <class Params>
CUTE_HOST_DEVICE constexpr int64_t work_tiles(Params const& params, int32_t tile_m) {
  return tile_count(params.seqlen_q, tile_m, params.heads, params.batch);
}

// Tile `index` of all these tiles. The tiles of a head follow each other, so that CTAs that run at
// the same time read the same K and V, which L2 holds. Within a head the tile of the last queries
// comes first. Under a causal mask it takes the longest, since its queries see the most keys. The
// shortest tiles run at the end, so that all SMs finish at about the same time.
template <class Params>
CUTE_HOST_DEVICE constexpr WorkTile work_tile(Params const& params, int32_t tile_m, int32_t index) {
  int32_t const m_blocks = ceil_div(params.seqlen_q, tile_m);
  int32_t const head_index = index / m_blocks;
  return {m_blocks - 1 - index % m_blocks, head_index % params.heads, head_index / params.heads};
}

// One warp among the warps of a whole grid, which may have more than 2^31 of them.
struct GridWarp {
  int64_t index;
  int64_t count;  // how many warps the grid has
};
// The warp of thread `thread` of CTA `cta`, in a grid of `ctas` CTAs of `threads` threads each.
CUTE_HOST_DEVICE constexpr GridWarp grid_warp(uint32_t cta, uint32_t ctas, uint32_t thread,
                                              uint32_t threads) {
  uint32_t const warps = threads / 32;
  return {int64_t(cta) * warps + thread / 32, int64_t(ctas) * warps};
}

// The order in which a persistent grid of CTAs takes the tiles of all heads and sequences. Each CTA
// computes which tile is its next one; this needs no counter in memory.
//
// Heads: the tiles of a head follow each other, so that CTAs that run at the same time read the
//   same K and V, which L2 holds. Each round begins with another CTA than the round before, so that
//   the short last tiles of the heads go to different CTAs.
// Pairs: like Heads, but a CTA takes two tiles of a head: the n-th tile from the end of the head,
//   and then the n-th tile from its start. Under a causal mask all such pairs take about as long.
// Longest: first the last tile of every head, then the last but one of every head, and so on. Under
//   a causal mask the last tile of a head sees the most keys. The CTAs take tiles in snake order, 0
//   1 2 2 1 0, so that the CTA with the longest tile of a round gets the shortest tile of the next.
//   This order balances the CTAs best, but it needs the K and V of all heads at the same time.
enum class Order : int32_t { Heads, Pairs, Longest };

struct Schedule {
  Order order;
  int32_t tiles;
  int32_t m_blocks;
  int32_t heads;      // heads of one sequence
  int32_t all_heads;  // heads of all sequences together

  // Finds the tile that CTA `cta` of `ctas` takes in round `round`, and writes it to `work`.
  // Returns whether there is one. In the order Pairs a CTA may have no tile in one round and one in
  // a later round: `more` says whether a later round can have one.
  CUTE_HOST_DEVICE constexpr bool tile(int32_t cta, int32_t ctas, int32_t round, WorkTile& work,
                                       bool& more) const {
    if (order == Order::Pairs) {
      int32_t const pairs =
          (m_blocks + 1) / 2;  // of a head; of an odd number of tiles the middle one stays alone
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

// Chooses the order for a grid of `ctas` CTAs. `l2_bytes` says how much of the L2 cache K and V may
// take. The order is
//   Heads    unless the mask bounds the keys on the right side alone, as a causal mask does;
//   Pairs    under such a mask, if the K and V of all heads exceed l2_bytes, and if more than nine
//            tenths of the CTAs have a pair in the average round;
//   Longest  under such a mask, in all other cases.
template <class Params>
constexpr Schedule make_schedule(Params const& params, int32_t tile_m, int32_t ctas,
                                 int64_t l2_bytes) {
  int32_t const m_blocks = ceil_div(params.seqlen_q, tile_m);
  int64_t const all_heads = int64_t(params.batch) * params.heads;
  // For packed sequences the host counts each sequence as long as the longest one. This may be far
  // more than there is, even more than 64 bits can hold, so the product is a double.
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
  // For the same reason `tiles` may count far more tiles than packed sequences have.
  int64_t const tiles = work_tiles(params, tile_m);
  return {order, int32_t(tiles < kMaxTiles ? tiles : kMaxTiles), m_blocks, params.heads,
          int32_t(all_heads)};
}

}  // namespace cute_attention
