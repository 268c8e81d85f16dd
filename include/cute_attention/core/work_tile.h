// core/work_tile.h: the tiles of queries of all heads and sequences, and the order in which CTAs
// compute them.
#pragma once

#include <cutlass/fast_math.h>

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
// computes which tile is its next one; this needs no counter in memory. On sm90, CTAs take the
// tiles of the order Longest from a counter instead where they have one (Schedule::taken()).
//
// Heads: the tiles of a head follow each other, so that CTAs that run at the same time read the
//   same K and V, which L2 holds. Each round begins with another CTA than the round before, so that
//   the short last tiles of the heads go to different CTAs.
// Longest: first the last tile of every head, then the last but one of every head, and so on. Under
//   a causal mask the last tile of a head sees the most keys. The CTAs take tiles in snake order, 0
//   1 2 2 1 0, so that the CTA with the longest tile of a round gets the shortest tile of the next.
//   This order balances the CTAs best, but it needs the K and V of all heads at the same time.
//   So where L2 does not hold them, rounds of pairs come before it: there the tiles of a head
//   follow each other, and a CTA takes two of them, the n-th from the end of the head, and then the
//   n-th from its start. Under a causal mask all such pairs take about as long. Pairs alone would
//   leave most CTAs idle in their last round.
enum class Order : int32_t { Heads, Longest };

// Of a group of heads whose tiles are taken from a counter, K and V take no more bytes than this.
constexpr double kGroupBytes = 32e6;

struct Schedule {
  Order order;
  int32_t tiles;
  int32_t m_blocks;
  int32_t heads;        // heads of one sequence
  int32_t all_heads;    // heads of all sequences together
  int32_t pair_rounds;  // in which each CTA takes a pair; 0 in the order Heads
  int32_t group;        // heads whose K and V L2 holds together
  // Divide by the numbers of that name. A short call waits for its first tile, and a division by a
  // number that the compiler does not know takes 150 clocks or more.
  cutlass::FastDivmod by_m_blocks;
  cutlass::FastDivmod by_heads;
  cutlass::FastDivmod by_all_heads;
  cutlass::FastDivmod by_group;

  Schedule() = default;
  Schedule(Order order, int32_t tiles, int32_t m_blocks, int32_t heads, int32_t all_heads,
           int32_t pair_rounds = 0, int32_t group = 1)
      : order(order),
        tiles(tiles),
        m_blocks(m_blocks),
        heads(heads),
        all_heads(all_heads),
        pair_rounds(pair_rounds),
        group(group),
        by_m_blocks(m_blocks),
        by_heads(heads),
        by_all_heads(all_heads),
        by_group(group) {}

  // Tile `index` where the tiles of a head follow each other, the last one first.
  CUTE_HOST_DEVICE WorkTile tile_of_heads(int32_t index) const {
    int32_t head, from_last;
    by_m_blocks(head, from_last, index);
    return tile_of(head, from_last);
  }

  // Tile `index` of the order in which CTAs take tiles from a counter: the longest of a group of
  // heads first, and one group after the other. So the tiles that run at the same time read the
  // same K and V, and the last ones are the shortest. The order Heads has it, too, where a window
  // leaves the first queries of a sequence fewer keys than the others.
  CUTE_HOST_DEVICE WorkTile taken(int32_t index) const {
    int32_t const first = by_group.div(by_m_blocks.div(index)) * group;
    int32_t const i = index - first * m_blocks, count = min_of(group, all_heads - first);
    int32_t from_last, head;
    if (count == group) {
      by_group(from_last, head, i);
    } else {
      from_last = i / count;
      head = i % count;
    }
    return tile_of(first + head, from_last);
  }

  // Finds the tile that CTA `cta` of `ctas` takes in round `round`, and writes it to `work`.
  // Returns whether there is one. A round of pairs counts as two, of which the second has no tile
  // for the middle one of a head: `more` says whether a later round can have one.
  CUTE_HOST_DEVICE bool tile(int32_t cta, int32_t ctas, int32_t round, WorkTile& work,
                             bool& more) const {
    int32_t const pairs = (m_blocks + 1) / 2;  // of a head
    if (round < 2 * pair_rounds) {
      int32_t const pair = round / 2 * ctas + turned(cta, ctas, round / 2);
      int32_t const near = pair % pairs, far = m_blocks - 1 - near;
      bool const first = round % 2 == 0;
      more = true;
      work = tile_of(pair / pairs, first ? near : far);
      return first || near != far;
    }
    int32_t const later = round - 2 * pair_rounds;
    bool const backwards = order == Order::Longest && later % 2 != 0;
    int32_t const place = order == Order::Heads ? turned(cta, ctas, round)
                          : backwards           ? ctas - 1 - cta
                                                : cta;
    int32_t const index = later * ctas + place;
    if (order == Order::Heads) {
      more = index < tiles;
      work = tile_of_heads(index);
      return more;
    }
    if (pair_rounds == 0) {
      more = index < tiles;
      int32_t from_last, head;
      by_all_heads(from_last, head, index);
      work = tile_of(head, from_last);
      return more;
    }
    // The first head of which tiles are left, and how many of its pairs are taken.
    int32_t const head = pair_rounds * ctas / pairs, taken = pair_rounds * ctas % pairs;
    more = index < tiles - head * m_blocks - 2 * taken;
    work = more ? longest(head, taken, index) : WorkTile{};
    return more;
  }

 private:
  // The place of CTA `cta` of `ctas` in round `round`, where each round begins with another CTA.
  CUTE_HOST_DEVICE static constexpr int32_t turned(int32_t cta, int32_t ctas, int32_t round) {
    int32_t const place = cta + round;
    return place < ctas ? place : place < 2 * ctas ? place - ctas : place % ctas;
  }

  // The tile of a head that is `from_last` tiles before its last.
  CUTE_HOST_DEVICE WorkTile tile_of(int32_t head, int32_t from_last) const {
    WorkTile tile{m_blocks - 1 - from_last, 0, 0};
    by_heads(tile.batch, tile.head, head);
    return tile;
  }

  // The tile `index` of those that are left, the longest first. Head `head` has neither its `taken`
  // first nor its `taken` last tiles; the heads after it have all.
  CUTE_HOST_DEVICE WorkTile longest(int32_t head, int32_t taken, int32_t index) const {
    int32_t const whole = all_heads - head - 1, inner = m_blocks - 2 * taken;
    int32_t const begin = taken * whole, end = begin + inner * (whole + 1);
    if (index >= begin && index < end) {  // of all these heads
      int32_t const i = index - begin;
      return tile_of(head + i % (whole + 1), taken + i / (whole + 1));
    }
    int32_t const i = index < begin ? index : index - inner;
    return tile_of(head + 1 + i % whole, i / whole);
  }
};

// Whether the mask may leave tiles of queries different numbers of keys: one that bounds the keys
// on the right side, as a causal one does, or on the left, as a window.
template <class Params>
constexpr bool tiles_differ(Params const& params) {
  return params.window_right < params.seqlen_k || params.window_left < params.seqlen_k;
}

// Chooses the order for a grid of `ctas` CTAs. `l2_bytes` says how much of the L2 cache K and V may
// take. The order is Heads unless the mask bounds the keys on the right side alone, as a causal
// mask does, and then Longest. If the K and V of all heads exceed l2_bytes, all but one or two
// rounds are rounds of pairs. Where there are few rounds, these one or two would be half of the
// tiles, and read K and V from memory once more (head dim 256 at 512 tokens: 5 to 9 % slower on an
// H200): there all full rounds are of pairs, if the last one is nearly full, and else none.
template <class Params>
Schedule make_schedule(Params const& params, int32_t tile_m, int32_t ctas, int64_t l2_bytes) {
  int32_t const m_blocks = ceil_div(params.seqlen_q, tile_m);
  int64_t const all_heads = int64_t(params.batch) * params.heads;
  // For packed sequences the host counts each sequence as long as the longest one. This may be far
  // more than there is, even more than 64 bits can hold, so the product is a double.
  double const kv_bytes = 2.0 * params.batch * params.heads_kv * params.seqlen_k *
                          (int64_t(params.head_dim) + params.head_dim_v);
  bool const uneven =
      params.window_right < params.seqlen_k && params.window_left >= params.seqlen_k;
  // For the same reason `tiles` may count far more tiles than packed sequences have.
  int64_t const counted = work_tiles(params, tile_m);
  int32_t const tiles = int32_t(counted < kMaxTiles ? counted : kMaxTiles);
  constexpr int64_t kFewRounds = 4;
  int64_t const pairs = counted <= kMaxTiles ? (m_blocks + 1) / 2 * all_heads : 0;
  int64_t const rounds = pairs / ctas, begun = (pairs + ctas - 1) / ctas;
  int64_t const of_few = 10 * pairs > 9 * begun * ctas ? rounds : 0;
  int64_t const first_rounds = rounds < kFewRounds ? of_few : rounds - 1;
  int32_t const pair_rounds = uneven && kv_bytes > double(l2_bytes) ? int32_t(first_rounds) : 0;
  // Heads that share K and V follow each other.
  double const head_bytes = kv_bytes / params.batch / params.heads_kv;
  int64_t group = params.heads / params.heads_kv;
  for (double bytes = 2 * head_bytes; bytes <= kGroupBytes && group < all_heads; bytes *= 2) {
    group *= 2;
  }
  return {uneven ? Order::Longest : Order::Heads,
          tiles,
          m_blocks,
          params.heads,
          int32_t(all_heads),
          pair_rounds,
          int32_t(group < all_heads ? group : all_heads)};
}

}  // namespace cute_attention
