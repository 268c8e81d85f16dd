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

// The sm90 rows of head dim 64: one whose CTA has an SM for itself, with two buffers of Q, and two
// whose CTAs share one.
DeviceInfo const kHopper{0, 90, 132, 227 * 1024, 228 * 1024, 50 << 20, "test"};
KernelRow hopper_row(int32_t tile_m, int32_t tile_n, int32_t stages, int32_t stages_q) {
  KernelRow of_sm90 = row(tile_m, tile_n, 64, 4 * (1 + tile_m / 64));
  of_sm90.key.arch = Arch::Sm90;
  of_sm90.config.stages = stages;
  of_sm90.shared_memory_bytes = 2 * 64 * (stages_q * tile_m + 2 * stages * tile_n) + 1024;
  return of_sm90;
}
KernelRow const kAlone = hopper_row(192, 128, 4, 2);
KernelRow const kPair = hopper_row(128, 80, 3, 1);
KernelRow const kFour = hopper_row(64, 64, 2, 1);

// The queries of a tile of the row that the model prefers.
int32_t preferred(int32_t batch, int32_t seqlen_q, int32_t seqlen_k, int32_t heads, int32_t right) {
  Problem p = problem(seqlen_q, seqlen_k, kUnbounded, right);
  p.batch = batch;
  p.heads = p.heads_kv = heads;
  KernelRow const* best = &kAlone;
  for (KernelRow const* row : {&kPair, &kFour}) {
    if (estimate_us(*row, p, kHopper) < estimate_us(*best, p, kHopper)) best = row;
  }
  return best->config.tile_m;
}

void test_resident_ctas() {
  check_equal(resident_ctas(kAlone, kHopper), int64_t{1}, "by shared memory");
  check_equal(resident_ctas(kPair, kHopper), int64_t{2}, "by both");
  check_equal(resident_ctas(kFour, kHopper), int64_t{4}, "by registers");
}

// Behind each point, how many times the row was as fast as the faster one of the other two on an
// H200.
void test_head_dim_64() {
  check_equal(preferred(8, 2048, 2048, 32, kUnbounded), 192, "2048 tokens");              // 1.16
  check_equal(preferred(8, 2048, 2048, 32, 0), 192, "2048 tokens, causal");               // 1.05
  check_equal(preferred(16, 1024, 1024, 32, kUnbounded), 192, "1024 tokens");             // 1.12
  check_equal(preferred(32, 512, 512, 32, kUnbounded), 192, "512 tokens");                // 1.10
  check_equal(preferred(32, 577, 577, 16, kUnbounded), 192, "577 tokens");                // 1.04
  check_equal(preferred(8, 1500, 1500, 20, kUnbounded), 192, "1500 tokens");              // 1.13
  check_equal(preferred(4, 1024, 1024, 20, kUnbounded), 192, "4 sequences of 1024");      // 1.07
  check_equal(preferred(4, 4096, 77, 8, kUnbounded), 128, "77 keys, 4096 queries");       // 1.25
  check_equal(preferred(4, 1024, 77, 20, kUnbounded), 128, "77 keys, 1024 queries");      // 1.12
  check_equal(preferred(512, 80, 80, 16, kUnbounded), 128, "80 tokens");                  // 1.56
  check_equal(preferred(64, 197, 197, 12, kUnbounded), 128, "197 tokens");                // 1.07
  check_equal(preferred(64, 240, 240, 16, kUnbounded), 128, "240 tokens");                // 1.14
  check_equal(preferred(40, 400, 400, 16, kUnbounded), 128, "400 tokens");                // 1.12
  check_equal(preferred(4096, 49, 49, 4, kUnbounded), 64, "windows of 49 tokens");        // 1.16
  check_equal(preferred(64, 257, 257, 16, kUnbounded), 64, "257 tokens");                 // 1.10
  check_equal(preferred(64, 256, 256, 16, kUnbounded), 64, "256 tokens");                 // 1.18
  check_equal(preferred(64, 256, 256, 32, 0), 64, "256 tokens, causal");                  // 1.15
  check_equal(preferred(32, 512, 512, 32, 0), 64, "512 tokens, causal");                  // 1.07
  check_equal(preferred(40, 400, 400, 16, 0), 64, "400 tokens, causal");                  // 1.17
  check_equal(preferred(8, 1024, 64, 16, kUnbounded), 64, "64 keys");                     // 1.14
  check_equal(preferred(1, 256, 256, 16, kUnbounded), 64, "one sequence of 256 tokens");  // 1.10
}

// Each warpgroup of 64 queries visits the tiles of its own; one without queries counts half.
void test_warpgroup_tiles() {
  KernelConfig const config{192, 128, 4, 16};
  check_equal(warpgroup_tiles(problem(384, 384, kUnbounded, 0), config), 2.0,
              "causal: 1, 1 and 2 tiles, then 2, 3 and 3");
  check_equal(warpgroup_tiles(problem(384, 384, kUnbounded, kUnbounded), config), 3.0, "full");
  check_equal(warpgroup_tiles(problem(64, 384, kUnbounded, kUnbounded), config), 2.0,
              "one warpgroup has queries, and visits three tiles");
}

// How many times the backward rows of 192/128 without sums of dQ take as long as those with them.
double gain_of_sums(int32_t seqlen_q, int32_t seqlen_k, int32_t left, int32_t right) {
  auto const backward_row = [](int32_t tile_m, int32_t tile_n) {
    KernelRow of_sm90 = row(tile_m, tile_n, 192, 12);
    of_sm90.key.arch = Arch::Sm90;
    of_sm90.key.direction = Direction::Backward;
    of_sm90.key.head_dim_v = 128;
    return of_sm90;
  };
  Problem const p = problem(seqlen_q, seqlen_k, left, right);
  return estimate_us(backward_row(128, 64), p, kHopper) /
         estimate_us(backward_row(64, 128), p, kHopper);
}

// At these points the row with sums was measured on an H100, times the speed of the one without:
// 1.07, 1.08, 1.03, 1.06, 1.11, 1.06, 1.03 and 1.14; 0.94, 0.90, 0.96, 0.92 and 0.77.
void test_sums() {
  check(gain_of_sums(1024, 1024, kUnbounded, kUnbounded) > 1, "1024 tokens");
  check(gain_of_sums(2048, 2048, kUnbounded, kUnbounded) > 1, "2048 tokens");
  check(gain_of_sums(2048, 2048, kUnbounded, 0) > 1, "2048 tokens, causal");
  check(gain_of_sums(3072, 3072, kUnbounded, 0) > 1, "3072 tokens, causal");
  check(gain_of_sums(4096, 4096, kUnbounded, 0) > 1, "4096 tokens, causal");
  check(gain_of_sums(8192, 8192, 2048, 0) > 1, "a window of 2048 tokens");
  check(gain_of_sums(8192, 8192, 1024, 0) > 1, "a window of 1024 tokens");
  check(gain_of_sums(512, 8192, kUnbounded, kUnbounded) > 1, "512 queries, 8192 keys");
  check(gain_of_sums(512, 512, kUnbounded, kUnbounded) < 1, "512 tokens");
  check(gain_of_sums(512, 512, kUnbounded, 0) < 1, "512 tokens, causal");
  check(gain_of_sums(1536, 1536, kUnbounded, 0) < 1, "1536 tokens, causal");
  check(gain_of_sums(8192, 8192, 512, 0) < 1, "a window of 512 tokens");
  check(gain_of_sums(8192, 8192, 128, 0) < 1, "a window of 128 tokens");
  // Not measured: there is little that the sums could spare.
  for (int32_t const seqlen : {1, 8, 64, 128, 256}) {
    check(gain_of_sums(seqlen, seqlen, kUnbounded, kUnbounded) < 1, std::to_string(seqlen));
    check(gain_of_sums(std::min(seqlen, 64), 256, kUnbounded, kUnbounded) < 1, "256 keys");
  }
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
  cute_attention::test_resident_ctas();
  cute_attention::test_head_dim_64();
  cute_attention::test_warpgroup_tiles();
  cute_attention::test_sums();
  cute_attention::test_question();
  return cute_attention::testing::report();
}
