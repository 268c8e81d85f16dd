// test_leftover_key.cpp: which calls of the backward have a leftover key, and where its numbers
// lie.
#include "layouts/host_cuda.h"
// The header below needs the one above.
#include "cute_attention/core/leftover_key.h"

#include <set>

#include "check.h"
#include "grad_problem.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

struct Traits {
  using Element = cutlass::half_t;
  static constexpr int kTileM = cute_attention::kTileM;
  static constexpr int kHeadDim = 128, kHeadDimV = 128;
};

bool has_key(BackwardParams const& params) { return has_leftover_key(params, kTileN, kCtas); }

void check_which_calls() {
  check(has_key(problem(64, 257, 257, 16, 16)), "257 keys");
  check(has_key(problem(64, 100, 129, 16, 2)), "129 keys, grouped heads");
  check(has_key(problem(64, 1, 1025, 16, 16)), "one query");
  check(!has_key(problem(64, 257, 1, 16, 16)), "one key: no whole block");
  for (int keys : {255, 256, 258, 260}) {
    check(!has_key(problem(64, 257, keys, 16, 16)), "another number of keys");
  }
  check(!has_key(problem(64, 0, 257, 16, 16)), "no queries: nobody would write dK and dV");
  check(!has_key(problem(64, 257, 257, 16, 16, true)), "causal");
  check(has_key(problem(64, 1, 257, 16, 16, true)), "causal, and the only query sees all keys");
  check(!has_key(problem(1, 257, 257, 44, 44)), "as many blocks as CTAs");
  check(has_key(problem(1, 257, 257, 45, 45)), "one head more");
  BackwardParams params = problem(64, 257, 257, 16, 16);
  params.window_left = 255;
  check(!has_key(params), "the last query does not see the first key");
  params.window_left = 256;
  check(has_key(params), "it does");
  params = problem(64, 257, 257, 16, 16);
  static int32_t const cu_seqlens = 0;
  params.cu_seqlens_q = params.cu_seqlens_k = &cu_seqlens;
  check(!has_key(params), "packed");
}

// Sums of different tiles of queries have different places behind dS, and all of them have room.
void check_places() {
  BackwardParams const params = problem(3, 200, 256, 4, 2);
  LeftoverKey<Traits> const key{params, nullptr};
  int64_t const numbers = leftover_key_numbers(params, kTileM, key.kCols);
  std::set<int64_t> places;
  for (int batch = 0; batch < 3; ++batch) {
    for (int head = 0; head < 4; ++head) {
      for (int m_block = 0; m_block < 4; ++m_block) {
        int64_t const place = key.sums(batch, head, m_block) - key.numbers;
        check(place >= lse_size(params) && place + key.kCols <= numbers, "room for sums");
        check(places.empty() || place >= *places.rbegin() + key.kCols, "one behind the other");
        places.insert(place);
      }
    }
  }
  check_equal(int64_t(places.size()), work_tiles(params, kTileM), "tiles");
  check_equal(*places.rbegin() + key.kCols, numbers, "nothing is left");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::check_which_calls();
  cute_attention::check_places();
  return cute_attention::testing::report();
}
