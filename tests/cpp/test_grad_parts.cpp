// test_grad_parts.cpp: the parts into which the steps of a block of keys are divided. Compares the
// steps of all parts with those of the whole block, and the number of parts with what a simulation
// of all CTAs finds for every number.
#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/grad_parts.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr int kTileM = 64;
constexpr int kTileN = 128;
constexpr int kCtas = 132;

// A call whose queries and keys are at address 0 or behind it: nobody reads them.
BackwardParams problem(int batch, int seqlen_q, int seqlen_k, int heads, int heads_kv,
                       bool causal = false) {
  BackwardParams params{};
  params.batch = batch;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.heads = heads;
  params.heads_kv = heads_kv;
  params.head_dim = params.head_dim_v = 128;
  params.window_left = kUnbounded;
  params.window_right = causal ? 0 : kUnbounded;
  params.q_stride = params.grad_o_stride = {int64_t(seqlen_q) * heads * 128, heads * 128, 128};
  return params;
}

Sequence sequence_of(BackwardParams const& params) {
  return make_sequence(params.seqlen_q, params.seqlen_k, 0, 0, params.window_left,
                       params.window_right);
}

// The steps of all parts together are all tiles of queries of all query heads of the group, in
// order and with the addresses of each, and as many parts have steps as parts_with_steps() says.
void check_parts(BackwardParams const& params, MTiles const& tiles, int head_kv, int parts) {
  int const group = params.heads / params.heads_kv;
  StepParts const of = step_parts(params, kTileN, parts);
  Sequence const sequence = sequence_of(params);
  std::vector<std::pair<int, int>> expected, found;
  // Of parts that have whole heads, each has so many of them; otherwise all have all.
  int const heads = of.whole_heads ? ceil_div(group, parts) : group;
  int const first = head_kv * group, end = first + group;
  for (int begin = first; begin < end; begin += heads) {
    for (int m_block = tiles.end - 1; m_block >= tiles.begin; --m_block) {
      for (int head = begin; head < std::min(begin + heads, end); ++head) {
        expected.push_back({head, m_block});
      }
    }
  }
  int const filled = parts_with_steps(tiles.count(), of);
  int with_steps = 0, longest = 0;
  for (int part = 0; part < parts; ++part) {
    GradTile const tile{0, head_kv, 1, part};
    StepRange const range = steps_of_part(tiles, tile, of);
    BackwardSteps<char, kTileM> const walk(params, tile, sequence, range);
    check_equal(walk.count() > 0, part < filled, "the first parts have steps");
    with_steps += walk.count() > 0;
    longest = std::max(longest, walk.count());
    if (walk.count() == 0) continue;
    auto step = walk.first();
    for (int i = 0; i < walk.count(); ++i, walk.advance(step)) {
      found.push_back({step.head, step.m_block});
      int64_t const row = int64_t(step.m_block) * kTileM;
      check_equal(step.row, (int64_t(params.heads) + step.head) * params.seqlen_q + row, "row");
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
  check(16 * longest * parts <= 17 * steps + 16 * parts || of.whole_heads, "parts are about equal");
}

void test_parts_divide_the_steps() {
  char const memory = 0;
  int32_t turn = 0;
  for (int heads_kv : {1, 2}) {
    for (int group : {1, 3, 71}) {
      BackwardParams params = problem(2, 7 * kTileM, 500, heads_kv * group, heads_kv, true);
      params.q = params.grad_o = &memory;
      for (int32_t* turns : {static_cast<int32_t*>(nullptr), &turn}) {
        params.grad_q_turn = turns;
        for (int begin = 0; begin <= 7; ++begin) {
          for (int end = begin; end <= 7; ++end) {
            for (int parts : {1, 2, 3, 5, 8, 64, 1024}) {
              check_parts(params, {begin, begin, end, end}, heads_kv - 1, parts);
            }
          }
        }
      }
    }
  }
  // The most steps that the tiles of a launch allow.
  check_equal(parts_with_steps(int32_t(kMaxTiles), {1, 1, true}), 1, "one part");
  check_equal(parts_with_steps(int32_t(kMaxTiles), {1, 1024, false}), 1024, "many parts");
  // Parts of whole heads, where these divide well.
  check_equal(longest_part(7, step_parts(71, 4)), 7 * 18, "71 heads in 4 parts");
  check_equal(longest_part(7, step_parts(8, 8)), 7, "a head each");
  check_equal(longest_part(7, step_parts(20, 6)), 24, "20 heads in 6 parts");
}

// When the sums of dQ of each tile of queries of each query head were added to last.
struct Additions {
  int m_blocks;
  std::vector<int64_t> last;

  explicit Additions(BackwardParams const& params)
      : m_blocks(ceil_div(params.seqlen_q, kTileM)),
        last(size_t(params.batch) * params.heads * m_blocks) {}

  // A part whose first step ends at `time` adds dQ of each step to that of the blocks before, when
  // these have added theirs. Returns when its last step ends.
  int64_t add(BackwardParams const& params, GradTile const& tile, StepRange const& range,
              int64_t time) {
    Sequence const sequence = sequence_of(params);
    BackwardSteps<char, kTileM> const walk(params, tile, sequence, range);
    auto [head, m_block] = std::pair{range.head, range.m_block};
    for (int step = 0; step < range.count; ++step, walk.advance(head, m_block)) {
      int64_t& before = last[(int64_t(tile.batch) * params.heads + head) * m_blocks + m_block];
      time = std::max(step == 0 ? time : time + 1, before);
      before = time;
    }
    return time;
  }
};

// How long `ctas` CTAs take that each take the next part when they are free, in steps: a part takes
// two steps more than it has, and two more where its sums are to be added up; these sums take one
// step for each part of a CTA. If the params ask for a fixed order, dQ of a step waits for that of
// the blocks before.
double simulate(BackwardParams const& params, int parts, int ctas) {
  GradSchedule const schedule =
      make_grad_schedule(params, kTileM, kTileN, int64_t(1) << 24, ctas, parts);
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_at;
  for (int cta = 0; cta < ctas; ++cta) free_at.push(0);
  Additions additions(params);
  int64_t end = 0;
  for (int64_t index = 0; index < schedule.tiles(); ++index) {
    GradTile const tile = schedule.tile(int32_t(index));
    MTiles const tiles = m_tiles(sequence_of(params), tile.n_block * kTileN, kTileN, kTileM);
    StepRange const range = steps_of_part(tiles, tile, step_parts(params, kTileN, parts));
    int64_t done = free_at.top();
    if (range.count > 0) {
      done = params.grad_q_turn == nullptr ? done + range.count
                                           : additions.add(params, tile, range, done + 1);
      done += parts == 1 ? 2 : 4;
    }
    free_at.pop();
    free_at.push(done);
    end = std::max(end, done);
  }
  return double(end) + (parts == 1 ? 0 : double(schedule.tiles()) / ctas);
}

std::string name_of(BackwardParams const& params, int parts) {
  std::ostringstream text;
  text << params.batch << " x " << params.seqlen_q << " x " << params.seqlen_k << ", heads "
       << params.heads << " over " << params.heads_kv << ", window " << params.window_left << " "
       << params.window_right << ", " << parts << " parts";
  return text.str();
}

// Compares the number of parts with all numbers: it is never worse than one part, and never far
// from the best.
void check_choice(BackwardParams const& params) {
  int const parts = grad_parts(params, kTileM, kTileN, kCtas);
  std::string const name = name_of(params, parts);
  int64_t const blocks = tile_count(params.seqlen_k, kTileN, params.heads_kv, params.batch);
  check(parts >= 1, name + ": at least one part");
  if (blocks >= 2 * kCtas) {
    check_equal(parts, 1, name + ": blocks that fill all CTAs twice");
    return;
  }
  check(parts == 1 || blocks * parts <= 4 * kCtas, name + ": the workspace is bounded");
  double const whole = simulate(params, 1, kCtas), time = simulate(params, parts, kCtas);
  check(time <= 1.1 * whole + 3, name + ": " + std::to_string(time) + " steps, and " +
                                     std::to_string(whole) + " with one part");
  double best = whole;
  for (int other = 2; blocks * other <= 4 * kCtas; ++other) {
    best = std::min(best, simulate(params, other, kCtas));
  }
  check(time <= 1.3 * best + 3, name + ": " + std::to_string(time) + " steps, and " +
                                    std::to_string(best) + " with the best number");
}

void test_choice() {
  int split = 0, whole = 0;
  for (int batch : {1, 2, 3, 5}) {
    for (auto const& [heads, heads_kv] : {std::pair{1, 1}, {16, 1}, {71, 1}, {20, 20}, {64, 8}}) {
      for (int seqlen_q : {1, 64, 512, 1024, 4096}) {
        for (int seqlen_k : {1, 77, 512, 2048, 8192}) {
          for (bool causal : {false, true}) {
            BackwardParams params = problem(batch, seqlen_q, seqlen_k, heads, heads_kv, causal);
            check_choice(params);
            (grad_parts(params, kTileM, kTileN, kCtas) > 1 ? split : whole) += 1;
            params.window_left = 300;
            check_choice(params);
          }
        }
      }
    }
  }
  check(split > 100 && whole > 100, "both kinds of calls");
}

void test_known_calls() {
  auto const parts = [](BackwardParams const& params, int tile_m = kTileM) {
    return grad_parts(params, tile_m, kTileN, kCtas);
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
    return grad_parts(params, 128, kTileN, kCtas);
  };
  check_equal(packed(4, 2048, 8192, 71, 1), 2, "as if it were dense");
  check_equal(packed(64, 2048, 8192, 71, 1), 2, "many short sequences beside a long one");
  check_equal(packed(300, 2048, 8192, 71, 1), 1, "each sequence may have a block");
  check_equal(packed(4, 2048, 8192, 64, 8), 1, "512 blocks");
  check_equal(packed(1 << 20, 1 << 20, 128, 1, 1), 1, "more tiles than can be counted in parts");
  check_equal(packed(3, 64, 0, 4, 4), 1, "no keys");
}

// A CTA that adds to dQ in a fixed order waits for the parts of the blocks of lower numbers: these
// come before it, whatever the number of parts.
void test_order_of_parts() {
  int32_t turn = 0;
  for (int parts : {2, 3, 40}) {
    for (int64_t l2_bytes : {int64_t(0), int64_t(2000000), int64_t(1) << 40}) {
      BackwardParams params = problem(3, 300, 500, 8, 4);
      params.grad_q_turn = &turn;
      GradSchedule const schedule =
          make_grad_schedule(params, kTileM, kTileN, l2_bytes, kCtas, parts);
      check_equal(schedule.tiles(), int64_t(4 * 4 * 3) * parts, "parts");
      std::set<std::tuple<int, int, int, int>> seen;
      for (int index = 0; index < schedule.tiles(); ++index) {
        GradTile const tile = schedule.tile(index);
        check(tile.n_block >= 0 && tile.n_block < 4 && tile.head_kv >= 0 && tile.head_kv < 4 &&
                  tile.batch >= 0 && tile.batch < 3 && tile.part >= 0 && tile.part < parts,
              "a part lies in the problem");
        for (int part = 0; part < parts && tile.n_block > 0; ++part) {
          check(seen.count({tile.n_block - 1, tile.head_kv, tile.batch, part}) == 1,
                "all parts of the block before have come");
        }
        seen.insert({tile.n_block, tile.head_kv, tile.batch, tile.part});
      }
      check_equal(int64_t(seen.size()), schedule.tiles(), "different parts");
    }
  }
}

// A fixed order costs nothing where several query heads share a KV head, but for the longer part
// where their number does not divide the heads; and with one query head to each KV head it takes at
// most as long as blocks that are not divided.
void test_fixed_order() {
  int32_t turn = 0;
  int divided = 0;
  for (int batch : {1, 2}) {
    for (auto const& [heads, heads_kv] :
         {std::pair{1, 1}, {8, 8}, {2, 1}, {16, 1}, {71, 1}, {14, 2}, {28, 4}, {64, 4}, {64, 8}}) {
      for (int seqlen : {512, 1024, 4096, 8192}) {
        for (bool causal : {false, true}) {
          BackwardParams params = problem(batch, seqlen, seqlen, heads, heads_kv, causal);
          int const parts = grad_parts(params, kTileM, kTileN, kCtas);
          double const free = simulate(params, parts, kCtas), whole = simulate(params, 1, kCtas);
          params.grad_q_turn = &turn;
          check_equal(grad_parts(params, kTileM, kTileN, kCtas), parts, "the workspace fits");
          double const fixed = simulate(params, parts, kCtas);
          int const group = heads / heads_kv;
          double const longer = double(ceil_div(group, parts) * parts) / group;
          std::string const name =
              name_of(params, parts) + ": " + std::to_string(fixed) + " steps in a fixed order, ";
          check(fixed <= 1.05 * longer * free + 5 || fixed <= whole + 5,
                name + std::to_string(free) + " in any, " + std::to_string(whole) + " undivided");
          check(group == 1 || fixed <= 1.05 * longer * free + 5,
                name + std::to_string(free) + " in any");
          divided += parts > 1;
        }
      }
    }
  }
  check(divided > 20, "many calls have parts");
}

// The blocks of the sums of dK and dV lie in the workspace and do not overlap.
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
  params.grad_sink = &gradient;
  check(!has_one_adder(params, kTileM, kTileN), "sinks need the kernel after");
  params.grad_sink = nullptr;
  params.seqlen_k = 0;
  check(!has_one_adder(params, kTileM, kTileN), "without keys no step writes dQ");
}

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
    check_equal(grad_workspace(params, shape, 1).grad_kv_parts, int64_t(0), "one part");
    TileBlocks const blocks = grad_kv_blocks(params, kTileN);
    check_equal(grad_workspace(params, shape, 3).grad_kv_parts,
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
  test_choice();
  test_known_calls();
  test_packed_calls();
  test_order_of_parts();
  test_fixed_order();
  test_one_adder();
  test_workspace();
  return testing::report();
}
