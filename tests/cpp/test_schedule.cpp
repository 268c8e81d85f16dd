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

}  // namespace

int main() {
  for (int32_t m_blocks : {1, 2, 3, 4, 7, 16, 33}) {
    for (int32_t heads : {1, 3, 16}) {
      for (int32_t batch : {1, 2, 5}) {
        for (int32_t ctas : {1, 2, 7, 132}) {
          for (Order order : {Order::Heads, Order::Pairs, Order::Longest}) {
            walk({order, m_blocks * heads * batch, m_blocks, heads, heads * batch}, ctas);
          }
        }
      }
    }
  }
  // 16 heads of 128 tiles have 1024 pairs. With 132 CTAs they take 8 rounds, of which the last
  // occupies three quarters of the CTAs.
  check(balance(walk({Order::Pairs, 2048, 128, 16, 16}, 132)) > 0.96, "balance of pairs");
  check(balance(walk({Order::Longest, 2048, 128, 16, 16}, 132)) > 0.99, "balance of longest first");

  ForwardParams params{};
  params.batch = 1;
  params.heads = params.heads_kv = 16;
  params.seqlen_q = params.seqlen_k = 16384;
  params.head_dim = params.head_dim_v = 128;
  params.window_left = params.window_right = kUnbounded;
  check(make_schedule(params, 128, 132, 25 << 20).order == Order::Heads, "no mask");
  params.window_right = 0;
  check(make_schedule(params, 128, 132, 25 << 20).order == Order::Pairs, "causal");
  params.heads_kv = 1;  // its K and V fit
  check(make_schedule(params, 128, 132, 25 << 20).order == Order::Longest, "causal in L2");
  params.window_left = 512;  // every tile sees as many keys
  check(make_schedule(params, 128, 132, 25 << 20).order == Order::Heads, "window");
  check_equal(make_schedule(params, 128, 132, 25 << 20).tiles, 2048, "tiles");
  return report();
}
