// test_step_order.cpp: in which order the blocks of keys of a backward pass take the tiles of
// queries and the query heads (core/backward_steps.h).
#include <set>
#include <tuple>
#include <utility>

#include "check.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/grad_parts.h"
#include "grad_problem.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

// In any order every second round of CTAs goes up through the tiles of queries, in a fixed order
// none does, and without a causal mask or with at most two query heads for each KV head neither.
void test_rounds_that_go_up() {
  int32_t turn = 0;
  for (auto const& [heads, causal] : {std::pair{8, true}, {16, true}, {24, true}, {24, false}}) {
    BackwardParams params = problem(2, 1000, 4096, heads, 8, causal);
    for (int32_t* turns : {static_cast<int32_t*>(nullptr), &turn}) {
      params.grad_q_turn = turns;
      GradSchedule const schedule = make_grad_schedule(params, kTileM, kTileN, int64_t(1) << 24,
                                                       kCtas, {whole_blocks(params)});
      check_equal(schedule.tiles(), int64_t(512), "almost four rounds");
      for (int index = 0; index < schedule.tiles(); ++index) {
        int const round = index / kCtas;
        bool const expected =
            turns == nullptr && heads > 16 && causal && (round == 1 || round == 3);
        check_equal(schedule.order(index) == StepOrder::Up, expected, "a round that goes up");
      }
    }
  }
}

// With a window that hides half of the keys or more, blocks take one query head after the other.
void test_windows_take_head_after_head() {
  int32_t turn = 0;
  BackwardParams params = problem(2, 4096, 4096, 16, 4, true);
  for (int32_t window : {0, 100, 2048, 2049, kUnbounded}) {
    params.window_left = window;
    for (int32_t* turns : {static_cast<int32_t*>(nullptr), &turn}) {
      params.grad_q_turn = turns;
      GradSchedule const schedule = make_grad_schedule(params, kTileM, kTileN, int64_t(1) << 24,
                                                       kCtas, {whole_blocks(params)});
      bool const expected = window <= 2048;
      int by_heads = 0, up = 0;
      for (int index = 0; index < schedule.tiles(); ++index) {
        by_heads += schedule.order(index) == StepOrder::HeadAfterHead;
        up += schedule.order(index) == StepOrder::Up;
      }
      check_equal(by_heads, expected ? int(schedule.tiles()) : 0, "head after head");
      check_equal(up > 0, turns == nullptr && window > 2048, "rounds that go up");
    }
  }
}

// The parts of a block are pieces of one order of steps, and may be taken in different rounds: they
// go the same way, and have all its steps together.
void test_parts_go_the_same_way() {
  BackwardParams const params = problem(1, 1024, 1024, 71, 1, true);
  int goes_up = 0;
  for (StepParts const& parts :
       {parts_of_heads(71, 2), parts_of_all(71, 5), parts_of_all(71, 16), parts_of_heads(71, 20),
        parts_of_heads(71, 71), parts_of_all(71, 100), parts_of_heads(71, 300)}) {
    GradSchedule const schedule =
        make_grad_schedule(params, kTileM, kTileN, int64_t(1) << 24, kCtas, {parts});
    std::set<std::tuple<int, int, int>> seen;
    for (int index = 0; index < schedule.tiles(); ++index) {
      GradTile const tile = schedule.tile(index);
      MTiles const tiles = m_tiles(sequence_of(params), tile.n_block * kTileN, kTileN, kTileM);
      StepRange const range = steps_of_part(tiles, tile, parts, schedule.order(index));
      goes_up += range.count > 0 && range.order == StepOrder::Up;
      BackwardSteps<char, kTileM, true> const walk(params, tile, sequence_of(params), tiles, range);
      auto [head, m_block] = std::pair{range.head, range.m_block};
      for (int step = 0; step < range.count; ++step, walk.advance(head, m_block)) {
        check(seen.insert({tile.n_block, head, m_block}).second, "each step once");
      }
    }
    int64_t expected = 0;
    for (int n_block = 0; n_block < ceil_div(params.seqlen_k, kTileN); ++n_block) {
      expected += int64_t(params.heads) *
                  m_tiles(sequence_of(params), n_block * kTileN, kTileN, kTileM).count();
    }
    check_equal(int64_t(seen.size()), expected, "all steps");
  }
  check(goes_up > 0, "some parts go up");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_rounds_that_go_up();
  test_windows_take_head_after_head();
  test_parts_go_the_same_way();
  return testing::report();
}
