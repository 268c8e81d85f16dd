// test_cost_model.cpp: compares the key tiles that the cost model counts with a count by brute
// force, and checks which rows the model prefers.
#include <stdexcept>

#include "check.h"
#include "cost_model.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

// An A100. The rows below are like those of the tables: they take the shared memory of Q, one K and
// one V.
DeviceInfo const kDevice{0, 80, 108, 163 * 1024, 164 * 1024, 40 << 20, "test"};

KernelRow row(int32_t tile_m, int32_t tile_n, int32_t head_dim, int32_t warps) {
  KernelKey const key = kernel_key(Arch::Sm80, Direction::Forward, DType::Float16, head_dim,
                                   head_dim, score_mods::None);
  return {
      "row",   key,    {tile_m, tile_n, 1, warps}, warps * 32, 2 * head_dim * (tile_m + 2 * tile_n),
      nullptr, nullptr};
}

Problem problem(int32_t seqlen_q, int32_t seqlen_k, int32_t left, int32_t right) {
  return {
      Direction::Forward, DType::Float16, 1, seqlen_q, seqlen_k, 1, 1, 64, 64, left, right, 0, 0};
}

bool visible(Problem const& p, int64_t i, int64_t j) {
  int64_t const diagonal = i + p.seqlen_k - p.seqlen_q;
  return j >= diagonal - p.window_left && j <= diagonal + p.window_right;
}

// A tile of queries visits the key tiles from the first to the last key that any of its queries
// sees.
TileWork brute_force(Problem const& p, KernelConfig const& config) {
  TileWork work{0, 0, 0};
  for (int64_t begin = 0; begin < p.seqlen_q; begin += config.tile_m) {
    int64_t first = p.seqlen_k;
    int64_t last = -1;
    for (int64_t i = begin; i < std::min<int64_t>(begin + config.tile_m, p.seqlen_q); ++i) {
      for (int64_t j = 0; j < p.seqlen_k; ++j) {
        if (!visible(p, i, j)) continue;
        first = std::min(first, j);
        last = std::max(last, j);
      }
    }
    int64_t const tiles = last < first ? 0 : last / config.tile_n - first / config.tile_n + 1;
    work.ctas += 1;
    work.tiles += tiles;
    work.longest = std::max(work.longest, tiles);
  }
  return work;
}

void test_tile_work() {
  KernelConfig const config{16, 8, 1, 4};
  int32_t const bounds[] = {0, 1, 7, 20, kUnbounded};
  for (int32_t const seqlen_q : {1, 5, 16, 33, 64}) {
    for (int32_t const seqlen_k : {1, 8, 15, 40, 64}) {
      for (int32_t const left : bounds) {
        for (int32_t const right : bounds) {
          Problem const p = problem(seqlen_q, seqlen_k, left, right);
          TileWork const got = tile_work(p, config);
          TileWork const expected = brute_force(p, config);
          std::string const what = std::to_string(seqlen_q) + " x " + std::to_string(seqlen_k) +
                                   " window " + std::to_string(left) + ", " + std::to_string(right);
          check_equal(got.ctas, expected.ctas, "CTAs of " + what);
          check_equal(got.tiles, expected.tiles, "tiles of " + what);
          check_equal(got.longest, expected.longest, "longest of " + what);
        }
      }
    }
  }
}

void test_preferences() {
  KernelRow const large = row(128, 128, 64, 4);
  KernelRow const small = row(64, 64, 64, 4);
  KernelRow const wide = row(128, 128, 128, 4);

  // With few queries, small tiles waste less work and occupy more SMs. With many, both rows fill
  // the GPU.
  Problem shortest = problem(64, 64, kUnbounded, kUnbounded);
  shortest.heads = shortest.heads_kv = 8;
  check(estimate_us(small, shortest, kDevice) < estimate_us(large, shortest, kDevice),
        "small tiles win at 64 tokens");
  Problem longest = problem(8192, 8192, kUnbounded, kUnbounded);
  longest.heads = longest.heads_kv = 16;
  check(estimate_us(large, longest, kDevice) <= estimate_us(small, longest, kDevice),
        "large tiles do not lose at 8192 tokens");

  check(estimate_us(large, longest, kDevice) < estimate_us(wide, longest, kDevice),
        "a row of the right head_dim beats a wider one");
  Problem causal = longest;
  causal.window_right = 0;
  double const ratio = estimate_us(large, causal, kDevice) / estimate_us(large, longest, kDevice);
  check(ratio > 0.5 && ratio < 0.6, "causal costs a little more than half of full");

  KernelRow wide_values = row(64, 64, 64, 12), latent = wide_values;
  wide_values.key.head_dim_v = latent.key.head_dim_v = 512;
  latent.key.score_mods = score_mods::Qv;
  check(estimate_us(latent, longest, kDevice) > 1.5 * estimate_us(wide_values, longest, kDevice),
        "scores of 576 columns cost more than scores of 64");

  Problem nothing = problem(0, 64, kUnbounded, kUnbounded);
  check_equal(estimate_us(large, nothing, kDevice), 0.0, "no query costs nothing");
}

// A question about a row that is not there has the estimate of the row that is.
void test_question() {
  KernelRow const there = row(128, 64, 96, 4);
  CostQuestion question{there.key.arch,
                        there.key.head_dim,
                        there.key.head_dim_v,
                        there.config,
                        there.threads,
                        there.shared_memory_bytes,
                        kDevice.compute_capability,
                        kDevice.multiprocessors,
                        kDevice.shared_memory_per_multiprocessor};
  Problem const asked = problem(1000, 3000, 700, 0);
  check_equal(estimate_us(question, asked), estimate_us(there, asked, kDevice), "the same row");
  question.config.tile_n = 0;
  bool refused = false;
  try {
    estimate_us(question, asked);
  } catch (std::invalid_argument const&) {
    refused = true;
  }
  check(refused, "a tile without keys is refused");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_tile_work();
  cute_attention::test_preferences();
  cute_attention::test_question();
  return cute_attention::testing::report();
}
