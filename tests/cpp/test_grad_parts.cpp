// test_grad_parts.cpp: the parts into which the steps of a block of keys are divided. Compares the
// steps of all parts with those of the whole block. test_grad_schedule.cpp has the order in which
// CTAs take them, and how long they take.
#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/sm90/complete_heads.h"
#include "cute_attention/sm90/few_keys.h"
#include "grad_problem.h"
#include "kernels/row.h"

namespace cute_attention {
namespace rows {
CUTE_ATTENTION_BACKWARD(of_64, Sm90, BFloat16, 64, 64, None, 128, 128, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(of_64_alibi, Sm90, BFloat16, 64, 64, Alibi, 128, 128, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(of_96, Sm90, BFloat16, 96, 96, None, 64, 128, 3, 12, O3)
}  // namespace rows
static_assert(sm90::kHasFewKeys<rows::of_64> && !sm90::kHasFewKeys<rows::of_64_alibi> &&
                  !sm90::kHasFewKeys<rows::of_96>,
              "calls with few keys have kernels of their own at head dim 64, without features");
namespace {

using testing::check;
using testing::check_equal;

// The steps of all parts together are all tiles of queries of all query heads of the group, in
// order and with the addresses of each, and as many parts have steps as parts_with_steps() says.
void check_parts(BackwardParams const& params, MTiles const& tiles, int head_kv,
                 StepParts const& of, StepOrder order) {
  int const group = params.heads / params.heads_kv;
  Sequence const sequence = sequence_of(params);
  std::vector<std::pair<int, int>> expected, found;
  int const heads = of.bundle;
  int const first = head_kv * group, end = first + group;
  for (int begin = first; begin < end; begin += heads) {
    std::vector<int> tiles_in_order, heads_in_order;
    for (int i = 0; i < tiles.count(); ++i) {
      tiles_in_order.push_back(order == StepOrder::Up ? tiles.begin + i : tiles.end - 1 - i);
    }
    for (int head = begin; head < std::min(begin + heads, end); ++head) {
      heads_in_order.push_back(head);
    }
    if (order == StepOrder::HeadAfterHead) {
      for (int head : heads_in_order) {
        for (int m_block : tiles_in_order) expected.push_back({head, m_block});
      }
    } else {
      for (int m_block : tiles_in_order) {
        for (int head : heads_in_order) expected.push_back({head, m_block});
      }
    }
  }
  int const filled = parts_with_steps(tiles.count(), of);
  int with_steps = 0, longest = 0;
  for (int part = 0; part < of.count; ++part) {
    GradTile const tile{0, head_kv, 1, part};
    StepRange const range = steps_of_part(tiles, tile, of, order);
    BackwardSteps<char, kTileM, true, true> const walk(params, tile, sequence, tiles, range);
    check_equal(walk.count() > 0, part < filled, "the first parts have steps");
    with_steps += walk.count() > 0;
    longest = std::max(longest, walk.count());
    if (walk.count() == 0) continue;
    auto step = walk.first();
    for (int i = 0; i < walk.count(); ++i, walk.advance(step)) {
      found.push_back({step.head, step.m_block});
      int64_t const row = int64_t(step.m_block) * kTileM;
      int64_t const numbers = ceil_div(params.seqlen_q, kNumberRows) * kNumberRows;  // of a head
      check_equal(step.row, (int64_t(params.heads) + step.head) * numbers + row, "row");
      check_equal(
          step.q - static_cast<char const*>(params.q),
          params.q_stride.batch + step.head * params.q_stride.head + row * params.q_stride.row,
          "address of q");
    }
  }
  check(found == expected, "the steps of all parts, in order");
  check_equal(with_steps, filled, "parts with steps");
  int const steps = int(expected.size());
  check_equal(longest, std::min(steps, longest_part(tiles.count(), of)), "longest part");
  check(of.bundle < group || longest * filled < steps + std::max(filled, of.pieces) * (filled + 1),
        "pieces of all heads are about equal");
}

void test_parts_divide_the_steps() {
  char const memory = 0;
  for (int heads_kv : {1, 2}) {
    for (int group : {1, 3, 71}) {
      BackwardParams params = problem(2, 7 * kTileM, 500, heads_kv * group, heads_kv, true);
      params.q = params.grad_o = &memory;
      for (int begin = 0; begin <= 7; ++begin) {
        for (int end = begin; end <= 7; ++end) {
          for (int parts : {1, 2, 3, 5, 8, 64, 1024}) {
            for (StepOrder order : {StepOrder::Down, StepOrder::Up, StepOrder::HeadAfterHead}) {
              for (StepParts const& of :
                   {parts_of_heads(group, parts), parts_of_all(group, parts)}) {
                check(of.count <= parts, "at most as many parts as asked for");
                check_parts(params, {begin, begin, end, end}, heads_kv - 1, of, order);
              }
            }
          }
        }
      }
    }
  }
  // The most steps that the tiles of a launch allow.
  check_equal(parts_with_steps(int32_t(kMaxTiles), make_step_parts(1, 1, 1)), 1, "one part");
  check_equal(parts_with_steps(int32_t(kMaxTiles), make_step_parts(1, 1, 1024)), 1024,
              "many parts");
  check_equal(longest_part(7, parts_of_heads(71, 4)), 7 * 18, "71 heads in 4 bundles");
  check_equal(longest_part(7, parts_of_heads(8, 8)), 7, "a head each");
  check_equal(longest_part(7, parts_of_heads(2, 6)), 3, "three pieces of a head");
  check_equal(longest_part(7, parts_of_all(20, 6)), 24, "20 heads in 6 pieces");
}

void test_known_calls() {
  auto const parts = [](BackwardParams const& params, int tile_m = kTileM) {
    return divide_steps(params, tile_m, kTileN, kCtas, kL2Bytes, false).count;
  };
  check_equal(parts(problem(4, 4096, 4096, 16, 16)), 1, "512 blocks");
  check_equal(parts(problem(4, 4096, 4096, 16, 16, true)), 1, "512 blocks, causal");
  check_equal(parts(problem(1, 4224, 4224, 4, 4)), 1, "132 blocks for 132 CTAs");
  check_equal(parts(problem(4, 2048, 2048, 71, 1), 128), 2, "64 blocks, 128 of 132 CTAs");
  check_equal(parts(problem(2, 1024, 77, 8, 8), 128), 4, "16 blocks of 8 steps");
  check_equal(parts(problem(2, 4096, 77, 8, 8), 128), 8, "16 blocks of 32 steps");
  // Of 128 blocks the first has twice as many steps as the average, and would end last.
  check_equal(parts(problem(2, 8192, 8192, 16, 1)), 1, "128 blocks");
  check(parts(problem(2, 8192, 8192, 16, 1, true)) > 1, "128 blocks, causal");
  check_equal(parts(problem(1, 64, 64, 1, 1)), 1, "one step");
  for (auto const& [seqlen_q, seqlen_k] : {std::pair{0, 64}, {64, 0}, {0, 0}}) {
    check_equal(parts(problem(1, seqlen_q, seqlen_k, 1, 1)), 1, "nothing to divide");
  }
  check_equal(parts(problem(0, 64, 64, 1, 1)), 1, "no sequence");
}

// The lengths of packed sequences are taken from total_k and the greatest lengths.
void test_packed_calls() {
  int32_t const offsets = 0;
  auto const packed = [&](int batch, int longest, int64_t total, int heads, int heads_kv) {
    BackwardParams params = problem(batch, longest, longest, heads, heads_kv);
    params.cu_seqlens_q = params.cu_seqlens_k = &offsets;
    params.total_q = params.total_k = total;
    return divide_steps(params, 128, kTileN, kCtas, kL2Bytes, false).count;
  };
  check_equal(packed(4, 2048, 8192, 71, 1), 2, "as if it were dense");
  check_equal(packed(64, 2048, 8192, 71, 1), 2, "many short sequences beside a long one");
  check_equal(packed(300, 2048, 8192, 71, 1), 1, "each sequence may have a block");
  check_equal(packed(4, 2048, 8192, 64, 8), 1, "512 blocks");
  check_equal(packed(1 << 20, 1 << 20, 128, 1, 1), 1, "more tiles than can be counted in parts");
  check_equal(packed(3, 64, 0, 4, 4), 1, "no keys");
}

// One block of keys adds to dQ, and each tile of queries is one of its steps: found by looking at
// every query and every key.
void test_one_adder() {
  for (int seqlen_q : {1, 63, 64, 65, 200}) {
    for (int seqlen_k : {1, 77, 128, 129, 300}) {
      for (int left : {0, 10, 90, int(kUnbounded)}) {
        for (int right : {0, 5, int(kUnbounded)}) {
          BackwardParams params = problem(2, seqlen_q, seqlen_k, 4, 2);
          params.window_left = left;
          params.window_right = right;
          Sequence const sequence = sequence_of(params);
          std::set<int> seeing;
          for (int query = 0; query < seqlen_q; ++query) {
            for (int key = 0; key < seqlen_k; ++key) {
              if (key >= query + sequence.first_offset && key <= query + sequence.last_offset) {
                seeing.insert(query / kTileM);
              }
            }
          }
          bool const expected =
              seqlen_k <= kTileN && int(seeing.size()) == ceil_div(seqlen_q, kTileM);
          check_equal(has_one_adder(params, kTileM, kTileN), expected, "one adder");
        }
      }
    }
  }
  BackwardParams params = problem(2, 100, 100, 4, 2);
  check(has_one_adder(params, kTileM, kTileN), "100 keys have one adder");
  int32_t const offsets[] = {0, 100, 200};
  params.cu_seqlens_q = params.cu_seqlens_k = offsets;
  check(!has_one_adder(params, kTileM, kTileN), "packed sequences may be longer than that");
  params.cu_seqlens_q = params.cu_seqlens_k = nullptr;
  float gradient;
  check(keeps_no_sums(params, kTileM, kTileN), "100 keys need no sums");
  params.sink = &gradient;
  check(has_one_adder(params, kTileM, kTileN), "sinks that want no gradient change nothing");
  check(!keeps_no_sums(params, kTileM, kTileN), "the gradient of sinks may be asked for later");
  params.grad_sink = &gradient;
  check(!has_one_adder(params, kTileM, kTileN), "sinks need the kernel after");
  params.sink = nullptr;
  params.grad_sink = nullptr;
  params.seqlen_k = 0;
  check(!has_one_adder(params, kTileM, kTileN), "without keys no step writes dQ");
}

// Up to 64 keys calls take the kernels of sm90/few_keys.h, which have no sums of dQ at all.
void test_few_keys() {
  for (int seqlen_k : {0, 1, 49, 64, 65, 128}) {
    BackwardParams params = problem(2, 100, seqlen_k, 4, 2);
    bool const few = seqlen_k >= 1 && seqlen_k <= 64;
    check_equal(sm90::has_few_keys(params), few, "few keys");
    params.window_right = 0;
    check_equal(sm90::has_few_keys(params), few && 100 - seqlen_k < 64,
                "every tile of queries sees keys under a causal mask");
    float gradient;
    params.grad_sink = &gradient;
    check(!sm90::has_few_keys(params), "the gradient of sinks needs the kernel after");
  }
}

// Which calls have dQ of complete heads written before the kernel ends, and what that takes in the
// workspace (sm90/complete_heads.h).
template <int kDim, bool kCounts = true>
struct CountingTraits {
  static constexpr int kTileM = 128, kTileN = 128, kHeadDim = kDim, kConsumers = 2;
  static constexpr bool kCountsHeads = kCounts;
};
void test_complete_heads() {
  DeviceInfo device{};
  device.multiprocessors = 10;
  auto const counts = [&](auto traits, BackwardParams const& params) {
    using Traits = decltype(traits);
    bool const does = sm90::counts_heads<Traits>(params, device);
    int64_t const numbers =
        params.batch * params.heads_kv + 2 * grad_q_blocks(params, Traits::kTileM).count();
    check_equal(sm90::count_head_numbers<Traits>(params, device), does ? numbers : int64_t(0),
                "numbers in the workspace");
    return does;
  };
  BackwardParams params = problem(2, 300, 300, 10, 5);  // 30 blocks of keys
  check(counts(CountingTraits<64>{}, params), "three blocks of keys for each SM");
  check(!counts(CountingTraits<64, false>{}, params), "a row that does not");
  check(!counts(CountingTraits<128>{}, params), "above head dim 64 heads of more than 8 blocks");
  params.seqlen_k = 1024;
  check(!counts(CountingTraits<128>{}, params), "8 blocks");
  params.seqlen_k = 1025;
  check(counts(CountingTraits<128>{}, params), "9 blocks");
  params.seqlen_q = 0;
  check(!counts(CountingTraits<64>{}, params), "without queries there is no dQ");
  params = problem(1, 300, 300, 10, 9);  // 27 blocks of keys
  check(!counts(CountingTraits<64>{}, params), "fewer blocks");
  params = problem(2, 300, 300, 10, 5);
  int32_t const offsets = 0;
  params.cu_seqlens_q = params.cu_seqlens_k = &offsets;
  check(!counts(CountingTraits<64>{}, params), "packed sequences");
}

// The blocks of the sums of dK and dV lie in the workspace and do not overlap.
void test_workspace() {
  int32_t const offsets = 0;
  GradShape const shape{kTileM, kTileN, 64, 96};
  for (bool packed : {false, true}) {
    std::vector<int> lengths = {500, 500, 500};
    if (packed) lengths = {0, 1, 128, 127, 0, 129, 500, 256};
    BackwardParams params = problem(int(lengths.size()), 300, 500, 8, 4);
    if (packed) {
      params.cu_seqlens_q = params.cu_seqlens_k = &offsets;
      for (int length : lengths) params.total_k += length;
    }
    check_equal(grad_workspace<true>(params, shape, 0).grad_kv_parts, int64_t(0), "no parts");
    TileBlocks const blocks = grad_kv_blocks(params, kTileN);
    check_equal(grad_workspace<true>(params, shape, 3 * blocks.count()).grad_kv_parts,
                3 * blocks.count() * kTileN * (64 + 96), "three parts");
    std::set<int64_t> seen;
    int64_t expected = 0, row = 0;
    for (int batch = 0; batch < params.batch; ++batch) {
      for (int head = 0; head < params.heads_kv; ++head) {
        for (int n_block = 0; n_block * kTileN < lengths[batch]; ++n_block, ++expected) {
          seen.insert(blocks.first(batch, head, packed ? row : 0) + n_block);
        }
      }
      row += lengths[batch];
    }
    check_equal(int64_t(seen.size()), expected, "blocks of their own");
    check(*seen.begin() >= 0 && *seen.rbegin() < blocks.count(), "inside the workspace");
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_parts_divide_the_steps();
  test_known_calls();
  test_packed_calls();
  test_one_adder();
  test_few_keys();
  test_complete_heads();
  test_workspace();
  return testing::report();
}
