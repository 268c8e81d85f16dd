// test_grad_schedule.cpp: the order in which CTAs of the backward take the parts of all blocks of
// keys, and how long a simulation of them takes: with every number of parts, and where dQ is summed
// in a fixed order.
#include <algorithm>
#include <functional>
#include <queue>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/grad_parts.h"
#include "grad_problem.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

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
    MTiles const tiles = m_tiles(sequence, tile.n_block * kTileN, kTileN, kTileM);
    BackwardSteps<char, kTileM, true> const walk(params, tile, sequence, tiles, range);
    auto [head, m_block] = std::pair{range.head, range.m_block};
    for (int step = 0; step < range.count; ++step, walk.advance(head, m_block)) {
      int64_t& before = last[(int64_t(tile.batch) * params.heads + head) * m_blocks + m_block];
      time = std::max(step == 0 ? time : time + 1, before);
      before = time;
    }
    return time;
  }
};

// How long `ctas` CTAs take that each take the next part when they are free, in steps, with the
// costs of estimate_steps(): a part takes one step more than it has, and two more where its sums
// are to be added up, which takes four steps of 64 queries for each part of a CTA. If the params
// ask for a fixed order, dQ of a step waits for that of the blocks before.
double simulate(BackwardParams const& params, BlockDivision const& division, int ctas,
                int64_t l2_bytes = int64_t(1) << 24) {
  GradSchedule const schedule =
      make_grad_schedule(params, kTileM, kTileN, l2_bytes, ctas, division);
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_at;
  for (int cta = 0; cta < ctas; ++cta) free_at.push(0);
  Additions additions(params);
  int64_t end = 0;
  for (int64_t index = 0; index < schedule.tiles(); ++index) {
    GradTile const tile = schedule.tile(int32_t(index));
    MTiles const tiles = m_tiles(sequence_of(params), tile.n_block * kTileN, kTileN, kTileM);
    StepRange const range = steps_of_part(tiles, tile, schedule.parts_of(int32_t(index)),
                                          schedule.order(int32_t(index)));
    int64_t done = free_at.top();
    if (range.count > 0) {
      done = params.grad_q_turn == nullptr ? done + range.count
                                           : additions.add(params, tile, range, done + 1);
      done += schedule.is_divided(tile) ? 3 : 1;
    }
    free_at.pop();
    free_at.push(done);
    end = std::max(end, done);
  }
  int64_t const sums = division.parts.count == 1 ? 0 : schedule.tiles() - schedule.whole;
  return double(end) + 4 * double(sums) / ctas;
}
double simulate(BackwardParams const& params, StepParts const& parts, int ctas,
                int64_t l2_bytes = int64_t(1) << 24) {
  return simulate(params, BlockDivision{parts}, ctas, l2_bytes);
}
// How all blocks are divided.
StepParts grad_parts(BackwardParams const& params, int tile_m = kTileM) {
  return divide_steps(params, tile_m, kTileN, kCtas, kL2Bytes, params.grad_q_turn != nullptr);
}

std::string name_of(BackwardParams const& params, StepParts const& parts) {
  std::ostringstream text;
  text << params.batch << " x " << params.seqlen_q << " x " << params.seqlen_k << ", heads "
       << params.heads << " over " << params.heads_kv << ", window " << params.window_left << " "
       << params.window_right << ", " << parts.count << " parts";
  return text.str();
}

// Compares the number of parts with all numbers: it is never worse than one part, and never far
// from the best.
void check_choice(BackwardParams const& params) {
  StepParts const parts = grad_parts(params);
  std::string const name = name_of(params, parts);
  int64_t const blocks = tile_count(params.seqlen_k, kTileN, params.heads_kv, params.batch);
  check(parts.count >= 1, name + ": at least one part");
  if (blocks >= 2 * kCtas) {
    check_equal(parts.count, 1, name + ": blocks that fill all CTAs twice");
    return;
  }
  check(parts.count == 1 || blocks * parts.count <= 4 * kCtas, name + ": the workspace is bounded");
  double const whole = simulate(params, whole_blocks(params), kCtas),
               time = simulate(params, parts, kCtas);
  check(time <= 1.1 * whole + 3, name + ": " + std::to_string(time) + " steps, and " +
                                     std::to_string(whole) + " with one part");
  double best = whole;
  int const group = params.heads / params.heads_kv;
  for (int other = 2; blocks * other <= 4 * kCtas; ++other) {
    for (StepParts const& of : {parts_of_heads(group, other), parts_of_all(group, other)}) {
      best = std::min(best, simulate(params, of, kCtas));
    }
  }
  check(time <= 1.25 * best + 1, name + ": " + std::to_string(time) + " steps, and " +
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
            (grad_parts(params).count > 1 ? split : whole) += 1;
            params.window_left = 300;
            check_choice(params);
          }
        }
      }
    }
  }
  check(split > 100 && whole > 100, "both kinds of calls");
}

// A CTA that adds to dQ in a fixed order waits for the parts of the blocks of lower numbers: these
// come before it, whatever the number of parts.
void test_order_of_parts() {
  int32_t turn = 0;
  for (int parts : {2, 4, 40}) {
    for (int64_t l2_bytes : {int64_t(0), int64_t(2000000), int64_t(1) << 40}) {
      BackwardParams params = problem(3, 300, 500, 8, 4);
      params.grad_q_turn = &turn;
      GradSchedule const schedule =
          make_grad_schedule(params, kTileM, kTileN, l2_bytes, kCtas, {parts_of_heads(2, parts)});
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

// No CTA waits long for the last group of KV heads: under a causal mask its longest blocks begin
// while there is work for all.
void test_last_groups() {
  for (int seqlen : {2048, 4096, 8192}) {
    for (int heads : {16, 20, 25, 32, 40, 56, 64, 71, 80, 96, 128}) {
      BackwardParams const params = problem(1, seqlen, seqlen, heads, heads, true);
      int const n_blocks = seqlen / kTileN;
      if (heads * n_blocks < 6 * kCtas) {
        continue;  // whole rounds of blocks decide
      }
      double steps = 0;
      for (int n_block = 0; n_block < n_blocks; ++n_block) {
        steps += 1 + m_tiles(sequence_of(params), n_block * kTileN, kTileN, kTileM).count();
      }
      double const mean = steps * heads / kCtas;
      for (int64_t l2_bytes : {25, 30, 36}) {
        double const end = simulate(params, whole_blocks(params), kCtas, l2_bytes << 20);
        check(end < 1.04 * mean, std::to_string(heads) + " heads of " + std::to_string(seqlen) +
                                     ", " + std::to_string(l2_bytes) +
                                     " MB: " + std::to_string(end / mean) + " of the mean");
      }
    }
  }
}

// What a fixed order costs beside any other. Where parts have whole query heads it costs nothing
// but the longer part where their number does not divide the heads. Where parts are pieces of a
// head they wait for others: the longer the sequence, the more of what dividing gains is lost.
void test_fixed_order() {
  int32_t turn = 0;
  int whole = 0, pieces = 0;
  for (int batch : {1, 2}) {
    for (auto const& [heads, heads_kv] : {std::pair{1, 1},
                                          {2, 2},
                                          {8, 8},
                                          {2, 1},
                                          {3, 1},
                                          {8, 1},
                                          {16, 1},
                                          {71, 1},
                                          {12, 2},
                                          {14, 2},
                                          {28, 4},
                                          {64, 4},
                                          {64, 8}}) {
      for (auto const& [seqlen_q, seqlen_k] : {std::pair{512, 512},
                                               {1024, 1024},
                                               {2048, 2048},
                                               {4096, 4096},
                                               {8192, 8192},
                                               {4096, 600}}) {
        for (auto const& [left, right] :
             {std::pair{int(kUnbounded), int(kUnbounded)}, {int(kUnbounded), 0}, {512, 0}}) {
          BackwardParams params = problem(batch, seqlen_q, seqlen_k, heads, heads_kv);
          params.window_left = left;
          params.window_right = right;
          StepParts const parts = grad_parts(params);
          double const any = simulate(params, parts, kCtas);
          params.grad_q_turn = &turn;
          StepParts const waiting = grad_parts(params);
          int64_t const blocks = grad_kv_blocks(params, kTileN).count();
          int const most_parts = std::max(waiting.count, parts.count);
          check_equal(most_part_blocks(params, kTileM, kTileN, kCtas, kL2Bytes, false),
                      most_parts > 1 ? most_parts * blocks : 0, "the workspace fits");
          double const fixed = simulate(params, waiting, kCtas);
          int const group = heads / heads_kv;
          double const longer = double(ceil_div(group, parts.count) * parts.count) / group;
          double const most = parts.count <= group ? 1.12 * longer * any + 5 : 3 * any + 5;
          check(fixed <= most, name_of(params, parts) + ": " + std::to_string(fixed) +
                                   " steps in a fixed order, " + std::to_string(any) + " in any");
          (parts.count > group ? pieces : whole) += parts.count > 1;
        }
      }
    }
  }
  check(whole > 20 && pieces > 20, "both kinds of parts");
}

// Where the blocks of the last round alone are divided, every part of every block comes once, in
// the order of the blocks, and has a place of its own in the workspace.
void test_last_round_alone() {
  int32_t turn = 0;
  int divided = 0;
  for (auto const& [batch, seqlen, heads, heads_kv] : {std::tuple{1, 16384, 16, 16},
                                                       {2, 8192, 16, 16},
                                                       {8, 2048, 32, 32},
                                                       {1, 16384, 64, 8},
                                                       {16, 1024, 32, 32},
                                                       {1, 16896, 1, 1}}) {
    BackwardParams params = problem(batch, seqlen, seqlen, heads, heads_kv);
    BlockDivision const division =
        grad_division(params, kTileM, kTileN, kCtas, kL2Bytes, true, false);
    std::string const name = name_of(params, division.parts);
    int64_t const blocks = tile_count(seqlen, kTileN, heads_kv, batch);
    if (division.parts.count == 1) {
      check(blocks % kCtas == 0 || seqlen == 1024, name + ": CTAs wait");
      continue;
    }
    ++divided;
    check_equal(int64_t(division.whole), blocks - blocks % kCtas, name + ": whole rounds");
    check(simulate(params, division, kCtas) < simulate(params, whole_blocks(params), kCtas),
          name + ": it takes less time");
    GradSchedule const schedule =
        make_grad_schedule(params, kTileM, kTileN, int64_t(1) << 24, kCtas, division);
    int64_t const places = most_part_blocks(params, kTileM, kTileN, kCtas, kL2Bytes, true);
    check(places <= 4 * kCtas, name + ": the workspace is bounded");
    check_equal(places, schedule.divided() * division.parts.count, name + ": a place for each");
    int32_t number = 0, part = 0;
    for (int32_t index = 0; index < schedule.tiles(); ++index) {
      GradTile const tile = schedule.tile(index);
      check_equal(schedule.number(tile), number, name + ": the order of the blocks");
      check_equal(tile.part, part, name + ": the order of the parts");
      check_equal(schedule.is_divided(tile), number >= division.whole, name + ": which are whole");
      check_equal(schedule.parts_of(index).count,
                  number < division.whole ? 1 : division.parts.count, name + ": how many parts");
      if (++part == schedule.parts_of(index).count) {
        part = 0;
        ++number;
      }
    }
    check_equal(int64_t(number), blocks, name + ": all blocks");
    check_equal(grad_division(params, kTileM, kTileN, kCtas, kL2Bytes, false, false).parts.count, 1,
                name + ": a grid that is not persistent");
    check_equal(grad_division(params, kTileM, kTileN, kCtas, kL2Bytes, true, true).parts.count,
                division.parts.count, name + ": the same in a fixed order");
    params.grad_q_turn = &turn;
    check(simulate(params, division, kCtas) < simulate(params, whole_blocks(params), kCtas),
          name + ": it takes less time in a fixed order, too");
    params.grad_q_turn = nullptr;
    params.window_right = 0;
    check_equal(grad_division(params, kTileM, kTileN, kCtas, kL2Bytes, true, false).parts.count, 1,
                name + ": blocks of different lengths");
  }
  BackwardParams const one_block = problem(40, 4096, 77, 7, 7);
  check_equal(grad_division(one_block, kTileM, kTileN, kCtas, kL2Bytes, true, false).parts.count, 1,
              "one block of keys for each head");
  BackwardParams const two_blocks = problem(20, 4096, 177, 7, 7);
  check(grad_division(two_blocks, kTileM, kTileN, kCtas, kL2Bytes, true, false).parts.count > 1,
        "as many blocks, two for each head");
  check(divided >= 4, "some are divided");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_choice();
  test_last_round_alone();
  test_order_of_parts();
  test_last_groups();
  test_fixed_order();
  return testing::report();
}
