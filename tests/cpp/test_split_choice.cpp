// test_split_choice.cpp: into how many splits calls divide their keys: one where tiles of queries
// fill the GPU, and elsewhere about as many as fill it.
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

#include "check.h"
#include "cute_attention/core/few_queries.h"
#include "cute_attention/core/group_queries.h"
#include "cute_attention/core/query_packing.h"
#include "split_choice.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

DeviceInfo const kH200{0, 90, 132, 227 * 1024, 228 * 1024, 50 << 20, "test"};
DeviceInfo const kA100{0, 80, 108, 163 * 1024, 164 * 1024, 40 << 20, "test"};

ForwardGrid grid_of_sm80(ForwardParams const* p) {
  ForwardParams const told = with_groups_as_queries(*p);
  bool const few = takes_few_queries_kernel(told);
  int32_t const tile_m = few ? kFewQueriesTileM : 128;
  QueryPacking const packing = make_query_packing(told, tile_m, few ? tile_m : 1);
  return {packed_tiles(told, tile_m, packing) * told.heads_kv, packing.queries(tile_m)};
}
ForwardGrid grid_of_groups(ForwardParams const* p) {
  QueryPacking const packing = make_query_packing(*p, 128, 64);
  return {packed_tiles(*p, 128, packing) * p->heads_kv, packing.queries(128)};
}

KernelRow row(Arch arch, int32_t head_dim = 128) {
  bool const sm90 = arch == Arch::Sm90;
  KernelKey const key =
      kernel_key(arch, Direction::Forward, DType::BFloat16, head_dim, head_dim, 0);
  KernelConfig const config =
      sm90 ? KernelConfig{128, head_dim > 128 ? 64 : 128, 3, 12} : KernelConfig{128, 64, 1, 4};
  return {"row",
          key,
          config,
          config.warps * 32,
          sm90 ? 224 * 1024 : 64 * 1024,
          nullptr,
          nullptr,
          sm90 ? &grid_of_groups : &grid_of_sm80};
}

ForwardParams call(int32_t batch, int32_t seqlen_q, int32_t seqlen_k, int32_t heads,
                   int32_t heads_kv) {
  ForwardParams params{};
  params.batch = batch;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.heads = heads;
  params.heads_kv = heads_kv;
  params.head_dim = params.head_dim_v = 128;
  params.window_left = params.window_right = kUnbounded;
  return params;
}

int32_t splits(ForwardParams const& params, Arch arch = Arch::Sm90) {
  return best_splits(row(arch, params.head_dim), params, arch == Arch::Sm90 ? kH200 : kA100);
}

void test_known_calls() {
  // Decoding, 32 heads over 8: 8 tiles for 132 SMs.
  for (int32_t seqlen_k : {4096, 32768, 131072}) {
    int32_t const found = splits(call(1, 1, seqlen_k, 32, 8));
    check(found >= 11 && found <= 33, "decoding of " + std::to_string(seqlen_k) + " keys has " +
                                          std::to_string(found) + " splits");
  }
  // One KV head: half of the SMs read 128k keys. Of a million they are behind, and a second step of
  // the kernel that combines is worth it.
  check_equal(splits(call(1, 1, 131072, 8, 1)), 64, "decoding with one KV head");
  check(splits(call(1, 1, 1 << 20, 8, 1)) > 90, "a million keys of one KV head");
  // 512 queries over 50k keys, 8 heads: 32 tiles.
  check(splits(call(1, 512, 50000, 8, 8)) >= 4, "few queries over many keys");
  // 150 tiles would take two rounds, of which the second leaves most of the GPU idle.
  check(splits(call(150, 128, 65536, 1, 1)) > 1, "a second round that is nearly empty");
  check(splits(call(1, 512, 50000, 8, 8), Arch::Sm80) >= 4, "few queries over many keys on sm80");
}

// Decoding with keys in a cache on an H200: the grid of `bench decode` at head dims 128 and 256.
void test_decoding() {
  struct Point {
    int32_t batch, keys, splits[4];
  };
  int32_t const layouts[4][3] = {{32, 8, 128}, {64, 8, 128}, {8, 1, 128}, {16, 4, 256}};
  Point const points[] = {
      {1,
       4096,
       {16, 8, 32, 22}},  // with 64 heads the last of 8 splits combines 8 rows, and not of 16
      // With 64 heads a kernel combines, which begins late beside 128 CTAs; with one KV head it
      // would take a second step for more than 64 splits.
      {1, 32768, {16, 12, 64, 24}},
      {1, 131072, {16, 12, 64, 24}},
      {8, 8192, {2, 2, 8, 4}},  // 8 heads over 1: 8 splits took 30.4 us, and 16, for a kernel, 33
      {32, 4096, {1, 1, 4, 1}},
      {128, 2048, {1, 1, 1, 1}},
      {64, 16384, {1, 1, 2, 1}},
  };
  for (Point const& point : points) {
    for (int layout = 0; layout < 4; ++layout) {
      auto const [heads, heads_kv, head_dim] = layouts[layout];
      ForwardParams params = call(point.batch, 1, point.keys, heads, heads_kv);
      params.head_dim = params.head_dim_v = head_dim;
      params.window_right = 0;
      params.cache.seqused_k = reinterpret_cast<int32_t const*>(16);
      check_equal(splits(params), point.splits[layout],
                  std::to_string(heads) + " heads, " + std::to_string(point.batch) + " x " +
                      std::to_string(point.keys));
    }
  }
}

// The sm90 rows of head dim 64: a CTA of the first has an SM for itself, those of the others share
// one with one or three more.
template <int32_t kTileM>
ForwardGrid grid_of_tiles(ForwardParams const* p) {
  QueryPacking const packing = make_query_packing(*p, kTileM, 64);
  return {packed_tiles(*p, kTileM, packing) * p->heads_kv, packing.queries(kTileM)};
}
KernelRow row_of_64(KernelConfig const& config, int32_t shared_memory_bytes, GridFunction grid) {
  KernelRow of_64 = row(Arch::Sm90, 64);
  of_64.config = config;
  of_64.threads = 32 * config.warps;
  of_64.shared_memory_bytes = shared_memory_bytes;
  of_64.grid = grid;
  return of_64;
}
KernelRow const kRowsOf64[] = {
    row_of_64({192, 128, 4, 16}, 177 * 1024, &grid_of_tiles<192>),
    row_of_64({128, 80, 3, 12}, 77 * 1024, &grid_of_tiles<128>),
    row_of_64({64, 64, 2, 8}, 41 * 1024, &grid_of_tiles<64>),
};

// Which row and how many splits a call has. Behind each point, the microseconds with the row and
// the number nearest to it of 1 to 8, 10, 12, 16, 24 and 32, and those of the fastest of all (H200,
// bf16, L2 flushed).
void test_rows_of_head_dim_64() {
  struct Point {
    int32_t batch, seqlen_q, seqlen_k, heads, heads_kv, right;
    int32_t tile_m, splits;
  };
  Point const points[] = {
      {1, 512, 16384, 16, 16, kUnbounded, 128, 4},  // 87.8, 85.3
      {1, 512, 8192, 16, 16, kUnbounded, 128, 4},   // 51.9, 51.9
      {1, 1024, 16384, 8, 8, kUnbounded, 128, 4},   // 87.3, 87.3
      {1, 64, 16384, 16, 16, kUnbounded, 64, 16},   // 30.6, 30.6
      {1, 256, 16384, 16, 16, kUnbounded, 128, 8},  // 50.4, 50.4
      {2, 200, 4096, 8, 8, kUnbounded, 64, 8},      // 24.6, 24.4
      {1, 512, 50176, 8, 8, kUnbounded, 192, 11},   // 133.5, 122.0
      {4, 128, 8192, 8, 8, kUnbounded, 192, 4},     // 35.8, 35.3
      {1, 320, 8192, 16, 16, kUnbounded, 192, 4},   // 37.8, 37.8
      {1, 512, 8192, 16, 16, 0, 128, 4},            // 51.7, 51.7
      {1, 2048, 2048, 4, 4, kUnbounded, 192, 3},    // 24.8, 24.8
      {1, 700, 8192, 12, 12, kUnbounded, 64, 4},    // 53.2, 53.2
      {1, 1024, 4096, 8, 8, kUnbounded, 128, 4},    // 34.8, 34.8
      {1, 96, 32768, 12, 12, kUnbounded, 192, 11},  // 45.5, 45.5
      {2, 1500, 1500, 8, 8, kUnbounded, 192, 1},    // 27.3, 27.3
      {1, 512, 2048, 16, 16, kUnbounded, 192, 2},   // 27.0, 25.6
      {1, 512, 32768, 32, 4, 0, 192, 3},            // 264.6, 264.6
      {1, 4096, 4096, 2, 2, 0, 192, 6},             // 28.2, 27.7
  };
  for (Point const& point : points) {
    Problem problem{Direction::Forward,
                    DType::BFloat16,
                    point.batch,
                    point.seqlen_q,
                    point.seqlen_k,
                    point.heads,
                    point.heads_kv,
                    64,
                    64,
                    kUnbounded,
                    point.right,
                    0,
                    0,
                    kAnyRow};
    KernelRow const* best = kRowsOf64;
    for (KernelRow const& row : kRowsOf64) {
      if (call_us(row, problem, kH200) < call_us(*best, problem, kH200)) best = &row;
    }
    std::string const what = std::to_string(point.batch) + " x " + std::to_string(point.seqlen_q) +
                             " over " + std::to_string(point.seqlen_k);
    check_equal(best->config.tile_m, point.tile_m, "the row of " + what);
    check_equal(choose_splits(*best, problem, kH200), point.splits, "the splits of " + what);
  }
}

void test_one_split() {
  for (Arch arch : {Arch::Sm80, Arch::Sm90}) {
    std::string const what = arch == Arch::Sm80 ? " on sm80" : " on sm90";
    check_equal(splits(call(4, 4096, 4096, 16, 16), arch), 1, "tiles that fill the GPU" + what);
    check_equal(splits(call(1, 16384, 16384, 16, 16), arch), 1, "a long sequence" + what);
    check_equal(splits(call(2, 64, 64, 4, 4), arch), 1, "one KV tile" + what);
    check_equal(splits(call(1, 1, 128, 8, 8), arch), 1, "a tile of keys" + what);
    check_equal(splits(call(0, 64, 64, 4, 4), arch), 1, "no sequence" + what);
    ForwardParams window = call(1, 16, 50000, 8, 8);
    window.window_left = window.window_right = 20;
    check_equal(splits(window, arch), 1, "a window of a few keys" + what);
  }
  check_equal(splits(call(128, 1, 2048, 32, 8)), 1, "decoding of a large batch");
}

// At head dim 128 the registers of an SM hold two CTAs with tiles of 128 queries, though its shared
// memory has room for three, and four of the kernel for few queries, which packs heads.
void test_ctas_of_sm80() {
  auto const chosen = [](int32_t queries, int32_t heads, int32_t heads_kv) {
    return best_splits(row(Arch::Sm80), call(1, queries, 32768, heads, heads_kv), kH200);
  };
  for (auto const& [queries, heads] : {std::pair{1, 8}, {16, 8}, {64, 8}, {1, 32}, {16, 32}}) {
    int32_t const ctas = 8 * chosen(queries, heads, 8);
    check(ctas > 2 * 132 && ctas <= 4 * 132, std::to_string(queries) + " queries of " +
                                                 std::to_string(heads) + " heads have " +
                                                 std::to_string(ctas) + " CTAs");
  }
  int32_t const ctas = 8 * chosen(65, 8, 8);
  check(ctas > 132 && ctas <= 2 * 132, "65 queries have " + std::to_string(ctas) + " CTAs");
}

// More sequences or heads never take more splits, but for the rounding to whole tiles; and the
// tiles of all splits are at most those of the few rounds that are tried.
void test_monotone() {
  for (int32_t seqlen_k : {1000, 20000, 300000}) {
    int32_t previous = kMostSplits;
    for (int32_t batch = 1; batch <= 512; batch *= 2) {
      int32_t const found = splits(call(batch, 1, seqlen_k, 8, 1));
      check(found <= previous, "splits of a batch of " + std::to_string(batch));
      check(found == 1 || int64_t(found) * batch <= 4 * 132, "rounds");
      check(found <= (seqlen_k + 127) / 128, "no more splits than tiles");
      previous = found;
    }
    check_equal(previous, 1, "splits of the largest batch");
  }
}

void test_packed() {
  ForwardParams params = call(4, 1, 32768, 32, 8);
  params.cu_seqlens_q = params.cu_seqlens_k = reinterpret_cast<int32_t const*>(16);
  params.total_q = 4;
  params.total_k = 4 * 32768;
  check(splits(params) > 1, "packed decoding");
  params.batch = 200;
  params.total_q = 200;
  check_equal(splits(params), 1, "packed decoding of a large batch");
}

// No call that would be divided is left out by the test that needs no row.
void test_may_be_split() {
  int divided = 0, left_out = 0;
  for (int32_t batch : {1, 3, 16, 100, 1000}) {
    for (int32_t seqlen_q : {1, 17, 500, 4000}) {
      for (int32_t seqlen_k : {0, 1, 500, 40000}) {
        for (int32_t heads_kv : {1, 8, 32}) {
          for (int32_t group : {1, 8}) {
            ForwardParams const params =
                call(batch, seqlen_q, seqlen_k, heads_kv * group, heads_kv);
            for (Arch arch : {Arch::Sm80, Arch::Sm90}) {
              bool const may = may_be_split(params, arch == Arch::Sm90 ? kH200 : kA100);
              int32_t const found = splits(params, arch);
              check(may || found == 1, "a call that is left out is not divided");
              divided += found > 1;
              left_out += !may;
            }
          }
        }
      }
    }
  }
  check(divided > 20 && left_out > 20, "both kinds");
}

void test_who_decides() {
  KernelRow const sm90 = row(Arch::Sm90);
  ForwardParams params = call(1, 1, 32768, 32, 8);
  int32_t const best = best_splits(sm90, params, kH200);
  unsetenv("CUTE_ATTENTION_SPLITS");
  check_equal(choose_splits(sm90, params, kH200), best, "left open");
  setenv("CUTE_ATTENTION_SPLITS", "5", 1);
  check_equal(choose_splits(sm90, params, kH200), 5, "the environment");
  params.num_splits = 1;
  check_equal(choose_splits(sm90, params, kH200), 1, "the call, whatever the environment says");
  params.num_splits = 128;
  check_equal(choose_splits(sm90, params, kH200), 128, "more splits than the best number");
  KernelRow undivided = sm90;
  undivided.grid = nullptr;
  check_equal(choose_splits(undivided, params, kH200), 1, "a row that does not divide keys");
  ForwardParams without_keys = params;
  without_keys.seqlen_k = 0;
  check_equal(choose_splits(sm90, without_keys, kH200), 1, "no keys");
  // A grid that has room for three splits of each tile, and rows that 32 bits do not count.
  ForwardParams many = call(1 << 22, 1, 64, 128, 128);
  many.num_splits = 128;
  check_equal(choose_splits(sm90, many, kH200), 3, "as many CTAs as a grid may have");
  many.seqlen_q = 8;
  check_equal(choose_splits(sm90, many, kH200), 1, "more rows than 32 bits count");
  for (char const* wrong : {"0", "129", "-3", "two", "3x", " "}) {
    setenv("CUTE_ATTENTION_SPLITS", wrong, 1);
    try {
      splits_of_environment();
      check(false, std::string("CUTE_ATTENTION_SPLITS=") + wrong);
    } catch (std::invalid_argument const& error) {
      check_equal(std::string(error.what()),
                  "CUTE_ATTENTION_SPLITS is '" + std::string(wrong) + "', expected 1 to 128",
                  "the message");
    }
  }
  setenv("CUTE_ATTENTION_SPLITS", "", 1);
  check_equal(splits_of_environment(), 0, "an empty variable");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_known_calls();
  test_decoding();
  test_rows_of_head_dim_64();
  test_one_split();
  test_ctas_of_sm80();
  test_monotone();
  test_packed();
  test_may_be_split();
  test_who_decides();
  return testing::report();
}
