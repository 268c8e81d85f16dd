// test_backward_passes.cpp: how many CTAs the kernels before and after the backward kernel have for
// packed sequences.
#include "layouts/host_cuda.h"
// The header below needs the one above.
#include "cute_attention/core/backward_passes.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "check.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr int32_t kTileM = 128;

BackwardParams packed(std::vector<int32_t> const& lengths, int32_t longest) {
  static int32_t const cu_seqlens = 0;
  BackwardParams params{};
  params.cu_seqlens_q = params.cu_seqlens_k = &cu_seqlens;
  params.batch = int32_t(lengths.size());
  params.heads = params.heads_kv = 2;
  params.total_q = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  params.seqlen_q = longest;
  return params;
}

// The CTAs of a head take all tiles of each sequence, and are few.
void check_lengths(std::vector<int32_t> const& lengths) {
  int32_t const longest = std::max(1, *std::max_element(lengths.begin(), lengths.end()));
  BackwardParams const params = packed(lengths, longest);
  BackwardParams const passes = params_of_passes(params, kTileM);
  check(passes.seqlen_q > 0 && passes.seqlen_q <= longest, "length of the grid");
  int64_t tiles = 0, empty = 0;
  for (int32_t const length : lengths) {
    tiles += ceil_div(length, kTileM);
    empty += length == 0;
  }
  int64_t const ctas = work_tiles(passes, kTileM) / params.heads;
  check(ctas <= 4 * (tiles + empty) + 4 * int64_t(lengths.size()), "CTAs for each tile");
  int64_t const usual = work_tiles(params, kTileM) / params.heads;
  bool const alike = usual <= 2 * tiles;
  check(!alike || passes.seqlen_q == longest, "lengths that are alike have a CTA for each tile");
}

void test_packed() {
  check_lengths({1});
  check_lengths({0, 0, 0});
  check_lengths({512, 512, 512, 512});
  check_lengths({700, 129, 3, 0, 1024});
  std::vector<int32_t> lengths(4096, 32);
  check_lengths(lengths);
  lengths[7] = 8192;
  check_lengths(lengths);
  check_equal(work_tiles(params_of_passes(packed(lengths, 8192), kTileM), kTileM), 4096 * 2 * 5,
              "one long sequence among many");
  lengths[7] = 1 << 20;
  check_lengths(lengths);
}

void test_dense() {
  BackwardParams params{};
  params.batch = 3;
  params.seqlen_q = 5000;
  check_equal(params_of_passes(params, kTileM).seqlen_q, 5000, "a dense call");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_packed();
  cute_attention::test_dense();
  return cute_attention::testing::report();
}
