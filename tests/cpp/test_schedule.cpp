// test_schedule.cpp: a persistent grid takes every tile of queries exactly once, in each of the
// orders. Where an order promises that all CTAs get about as much work, they do.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "cute_attention/core/work_tile.h"

namespace {

using namespace cute_attention;
using cute_attention::testing::check;
using cute_attention::testing::check_equal;
using cute_attention::testing::report;

// Checks that the CTAs take every tile of queries once. Returns how many KV tiles each CTA visits
// under a causal mask, where tiles are square.
std::vector<int64_t> walk(Schedule const& schedule, int32_t ctas) {
  std::vector<int> taken(schedule.tiles, 0);
  std::vector<int64_t> cost(ctas, 0);
  for (int32_t cta = 0; cta < ctas; ++cta) {
    bool more = true;
    for (int32_t round = 0; more; ++round) {
      WorkTile work;
      if (schedule.tile(cta, ctas, round, work, more)) {
        check(more, "a tile in a round that has none");
        int64_t const head = int64_t(work.batch) * schedule.heads + work.head;
        check(work.m_block >= 0 && work.m_block < schedule.m_blocks, "m_block in range");
        check(work.head >= 0 && work.head < schedule.heads && head < schedule.all_heads,
              "head in range");
        ++taken[head * schedule.m_blocks + work.m_block];
        cost[cta] += work.m_block + 1;
      }
    }
  }
  check(std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; }),
        "every tile once");
  return cost;
}

// The mean work of a CTA over the work of the busiest one. 1 is perfect.
double balance(std::vector<int64_t> const& cost) {
  int64_t sum = 0;
  for (int64_t one : cost) sum += one;
  return double(sum) / double(cost.size()) / double(*std::max_element(cost.begin(), cost.end()));
}

// Causal calls of 16k and 32k tokens, whose K and V L2 does not hold: no CTA has 3 % more to do
// than the others, but where heads are short, and all tiles long beside them.
void test_balance() {
  for (int32_t seqlen : {1024, 2048, 4096, 8192, 16384}) {
    for (int32_t tokens : {1 << 14, 1 << 15}) {
      for (int32_t heads : {16, 24, 32}) {
        ForwardParams params{};
        params.batch = tokens / seqlen;
        params.heads = params.heads_kv = heads;
        params.seqlen_q = params.seqlen_k = seqlen;
        params.head_dim = params.head_dim_v = 128;
        params.window_left = kUnbounded;
        Schedule const schedule = make_schedule(params, 128, 132, 25 << 20);
        check(schedule.pair_rounds > 0, "pairs first");
        check(balance(walk(schedule, 132)) > 0.975, "balance of a causal call");
      }
    }
  }
}

// Tiles from a counter: every tile once, and within a group of heads none that is longer than the
// one before it.
void test_counter(int32_t m_blocks, int32_t heads, int32_t batch, int32_t group) {
  int32_t const all = heads * batch, tiles = m_blocks * all;
  Schedule const schedule{Order::Longest, tiles, m_blocks, heads, all, 0, group};
  std::vector<int> taken(tiles, 0);
  int32_t last_block = 0, last_group = -1;
  for (int32_t index = 0; index < tiles; ++index) {
    WorkTile const work = schedule.taken(index);
    int32_t const head = work.batch * heads + work.head;
    check(work.m_block >= 0 && work.m_block < m_blocks && work.head >= 0 && work.head < heads &&
              head < all,
          "a tile of the call");
    ++taken[head * m_blocks + work.m_block];
    check(head / group > last_group || (head / group == last_group && work.m_block <= last_block),
          "groups in their order, the longest first");
    last_group = head / group, last_block = work.m_block;
  }
  check(std::all_of(taken.begin(), taken.end(), [](int count) { return count == 1; }),
        "every tile once from the counter");
}

// Heads whose K and V take 32 MB together are a group, with all queries' heads that share them.
void test_groups() {
  ForwardParams params{};
  params.batch = 2;
  params.heads = 32;
  params.heads_kv = 8;
  params.seqlen_q = params.seqlen_k = 16384;  // 8.4 MB a head
  params.head_dim = params.head_dim_v = 128;
  params.window_left = kUnbounded;
  check_equal(make_schedule(params, 128, 132, 25 << 20).group, 8, "two heads of K and V");
  params.seqlen_k = 1 << 20;
  check_equal(make_schedule(params, 128, 132, 25 << 20).group, 4, "one at least");
  params.seqlen_k = 16;
  check_equal(make_schedule(params, 128, 132, 25 << 20).group, 64, "no more than there are");
}

}  // namespace

int main() {
  test_groups();
  for (int32_t m_blocks : {1, 2, 5, 16}) {
    for (int32_t group : {1, 2, 3, 8, 64}) {
      test_counter(m_blocks, 3, 5, group);
      test_counter(m_blocks, 16, 1, group);
    }
  }
  for (int32_t m_blocks : {1, 2, 3, 4, 7, 16, 33}) {
    for (int32_t heads : {1, 3, 16}) {
      for (int32_t batch : {1, 2, 5}) {
        for (int32_t ctas : {1, 2, 7, 132}) {
          int32_t const all = heads * batch, tiles = m_blocks * all;
          walk({Order::Heads, tiles, m_blocks, heads, all}, ctas);
          int32_t const most = (m_blocks + 1) / 2 * all / ctas;  // rounds that pairs fill
          for (int32_t rounds = 0; rounds <= most; rounds += 1 + most / 5) {
            walk({Order::Longest, tiles, m_blocks, heads, all, rounds}, ctas);
          }
          walk({Order::Longest, tiles, m_blocks, heads, all, most}, ctas);
        }
      }
    }
  }
  // 16 heads of 128 tiles have 1024 pairs. For 132 CTAs these are 7 rounds, and an eighth for three
  // quarters of the CTAs. The order balances the rest the better the more it is.
  check(balance(walk({Order::Longest, 2048, 128, 16, 16, 7}, 132)) < 0.975,
        "a rest without choice");
  check(balance(walk({Order::Longest, 2048, 128, 16, 16, 6}, 132)) > 0.985, "balance after pairs");
  check(balance(walk({Order::Longest, 2048, 128, 16, 16}, 132)) > 0.99, "balance of longest first");
  test_balance();

  ForwardParams params{};
  params.batch = 1;
  params.heads = params.heads_kv = 16;
  params.seqlen_q = params.seqlen_k = 16384;
  params.head_dim = params.head_dim_v = 128;
  params.window_left = params.window_right = kUnbounded;
  check(make_schedule(params, 128, 132, 25 << 20).order == Order::Heads, "no mask");
  params.window_right = 0;
  Schedule const causal = make_schedule(params, 128, 132, 25 << 20);
  check(causal.order == Order::Longest, "causal");
  check_equal(causal.pair_rounds, 6, "rounds of pairs");
  // Few rounds: 3.9 of pairs, then 3.4.
  params.batch = 8;
  params.heads = params.heads_kv = 16;
  params.seqlen_q = params.seqlen_k = 1024;
  check_equal(make_schedule(params, 128, 132, 1 << 20).pair_rounds, 3, "few rounds, nearly full");
  params.batch = 7;
  check_equal(make_schedule(params, 128, 132, 1 << 20).pair_rounds, 0, "few rounds, half full");
  params.batch = 1;
  params.seqlen_q = params.seqlen_k = 16384;
  params.heads_kv = 1;  // its K and V fit
  check(make_schedule(params, 128, 132, 25 << 20).order == Order::Longest, "causal in L2");
  check_equal(make_schedule(params, 128, 132, 25 << 20).pair_rounds, 0, "no pairs");
  check(tiles_differ(params), "causal: the first tiles see the fewest keys");
  params.window_left = 512;  // most tiles see as many keys
  check(make_schedule(params, 128, 132, 25 << 20).order == Order::Heads, "window");
  check(tiles_differ(params), "the first tiles see fewer keys than the window has");
  params.window_right = kUnbounded;
  check(tiles_differ(params), "the last tiles see fewer keys");
  params.window_left = kUnbounded;
  check(!tiles_differ(params), "no mask");
  params.window_left = 512, params.window_right = 0;
  check_equal(make_schedule(params, 128, 132, 25 << 20).tiles, 2048, "tiles");
  return report();
}
