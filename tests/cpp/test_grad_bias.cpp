// test_grad_bias.cpp: which tiles of scores add to each tile of the gradient of a bias, and how
// they are divided among CTAs.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "cute_attention/core/grad_bias_tiles.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr TileShape kTile = {64, 32};
constexpr int64_t kFloats = int64_t(8) << 20;  // of a workspace, at most
using Block = std::tuple<int, int, int, int>;

Block of(ScoreBlock const& block) {
  return {block.batch, block.head, block.m_block, block.n_block};
}

// A call whose gradient keeps the dimensions of the bits of `kept`: 1 batch, 2 heads, 4 queries, 8
// keys.
BackwardParams call(int kept, int batch, int heads, int seqlen_q, int seqlen_k) {
  BackwardParams params{};
  params.batch = batch;
  params.heads = heads;
  params.heads_kv = 1;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.grad_bias = {nullptr, kept & 1, kept & 2, kept & 4, (kept & 8) != 0, 0};
  return params;
}

std::vector<Block> visits_of_part(BackwardParams const& params, int parts, int64_t cta) {
  GradBiasWork const work =
      work_of_part(score_grid(params, kTile), grad_bias_grid(params, kTile), parts, cta);
  std::vector<Block> found;
  ScoreBlock block = work.first;
  for (int64_t i = 0; i < work.count; ++i) {
    if (i > 0) advance_visit(params, kTile, block);
    found.push_back(of(block));
  }
  return found;
}

// Every tile of scores adds to one tile of the gradient: the one that has its place, in the
// dimensions that are kept. However many parts there are, they are pieces of one walk.
void check_parts() {
  for (int kept = 0; kept < 16; ++kept) {
    BackwardParams const params = call(kept, 2, 3, 130, 65);
    BlockGrid const grad = grad_bias_grid(params, kTile);
    check_equal(
        grad.count(),
        int64_t((kept & 1 ? 2 : 1) * (kept & 2 ? 3 : 1) * (kept & 4 ? 3 : 1) * (kept & 8 ? 3 : 1)),
        "tiles of the gradient");
    int const visits = int(2 * 3 * 3 * 3 / grad.count());
    check_equal(visits_of_tile(score_grid(params, kTile), grad).count(), int64_t(visits),
                "visits of a tile");
    std::map<Block, int> seen;
    for (int64_t tile = 0; tile < grad.count(); ++tile) {
      std::vector<Block> const whole = visits_of_part(params, 1, tile);
      ScoreBlock const first = grad.block(tile);
      for (Block const& block : whole) {
        ++seen[block];
        check(!(kept & 1) || std::get<0>(block) == first.batch, "one sequence");
        check(!(kept & 2) || std::get<1>(block) == first.head, "one head");
        check(!(kept & 4) || std::get<2>(block) == first.m_block, "one tile of queries");
        check(!(kept & 8) || std::get<3>(block) == first.n_block, "one tile of keys");
      }
      for (int parts = 1; parts <= visits; ++parts) {
        std::vector<Block> joined;
        for (int part = 0; part < parts; ++part) {
          std::vector<Block> const piece =
              visits_of_part(params, parts, part * grad.count() + tile);
          check(piece.size() == whole.size() / parts || piece.size() == whole.size() / parts + 1,
                "parts of a size");
          joined.insert(joined.end(), piece.begin(), piece.end());
        }
        check(joined == whole, "the parts of a tile are its visits in order");
      }
    }
    check_equal(seen.size(), size_t(2 * 3 * 3 * 3), "tiles of scores");
    for (auto const& [tile, count] : seen) check_equal(count, 1, "visits of a tile");
  }
}

// Where nothing is summed, each tile is in one run, and runs do not leave their row of tiles.
void check_runs() {
  for (int run = 1; run <= 4; ++run) {
    BackwardParams const params = call(15, 2, 3, 130, 97);
    BlockGrid const grad = grad_bias_grid(params, kTile);
    GradBiasSchedule const schedule = {false, run, 1, 3};
    std::map<Block, int> seen;
    for (int64_t cta = 0; cta < grad_bias_ctas(grad, schedule); ++cta) {
      GradBiasWork const work = work_of_run(grad, run, cta);
      check(work.count >= 1 && work.count <= run, "length of a run");
      ScoreBlock block = work.first;
      for (int64_t i = 0; i < work.count; ++i, ++block.n_block) ++seen[of(block)];
    }
    check_equal(seen.size(), size_t(grad.count()), "tiles in runs");
    for (auto const& [tile, count] : seen) {
      check_equal(count, 1, "runs with a tile");
      check(std::get<3>(tile) < grad.n_blocks, "a tile of the gradient");
    }
  }
}

// Sums over nothing: no sequence of queries, where the bias is the same for all of them.
void check_no_visits() {
  BackwardParams const params = call(8, 2, 3, 0, 65);
  GradBiasSchedule const schedule = grad_bias_schedule(params, kTile, 264);
  check(schedule.sums && schedule.parts == 1, "no part of nothing");
  check_equal(grad_bias_ctas(grad_bias_grid(params, kTile), schedule), int64_t(3), "CTAs");
  check(visits_of_part(params, 1, 2).empty(), "no visit");
}

void check_schedule() {
  // A bias of 256 x 256 for 256 sequences of 4 heads: 128 tiles of 64 x 32. Two parts are a round
  // of 256 CTAs of 264.
  GradBiasSchedule const shared = grad_bias_schedule(call(14, 256, 4, 256, 256), kTile, 264);
  check(shared.sums && shared.run == 1, "a sum");
  check_equal(shared.parts, 2, "parts of 128 tiles");
  check_equal(grad_bias_schedule(call(14, 256, 1, 256, 256), kTile, 264).parts, 8,
              "parts of 32 tiles");
  // As many parts as visits, at most.
  check_equal(grad_bias_schedule(call(14, 3, 1, 64, 32), kTile, 264).parts, 3, "parts of 3 visits");
  // Enough tiles for all CTAs are not divided.
  check_equal(grad_bias_schedule(call(14, 8, 4, 1024, 1024), kTile, 264).parts, 1, "many tiles");
  // Nothing is summed.
  GradBiasSchedule const each = grad_bias_schedule(call(15, 1, 16, 4096, 4096), kTile, 264);
  check(!each.sums && each.parts == 1, "no sum");
  check_equal(each.run, 16 * 64 * 128 / (16 * 264), "a run leaves eight rounds of CTAs");
  check_equal(grad_bias_schedule(call(15, 128, 64, 64, 64), kTile, 264).run, 2,
              "a run ends with its row");
  check_equal(grad_bias_schedule(call(15, 1, 1, 64, 64), kTile, 264).run, 1, "few tiles");
  for (int kept = 0; kept < 16; ++kept) {
    for (int seqlen : {1, 63, 257, 1000}) {
      for (int batch : {1, 7, 300}) {
        for (int64_t ctas : {1, 82, 264, 528}) {
          BackwardParams const params = call(kept, batch, 12, seqlen, 2 * seqlen);
          GradBiasSchedule const schedule = grad_bias_schedule(params, kTile, ctas);
          BlockGrid const scores = score_grid(params, kTile), grad = grad_bias_grid(params, kTile);
          check(schedule.parts >= 1 && schedule.parts <= visits_of_tile(scores, grad).count(),
                "no part is empty");
          check(schedule.parts == 1 ||
                    schedule.parts * grad_bias_part_numbers(params, kTile) <= kFloats,
                "the workspace is bounded");
          check(schedule.run == 1 || (!schedule.sums && schedule.parts == 1), "one or the other");
          check(schedule.sums || kept == 15 || scores.count() == grad.count(), "what is a sum");
          check_equal(schedule.group, 12, "query heads of a KV head");
        }
      }
    }
  }
}

// A gradient of more tiles than 64 bits count is too large, and not by chance small.
void check_too_many_tiles() {
  BlockGrid const most{1 << 16, 1 << 15, 1 << 23, 1 << 24};
  check(most.count() > kMaxTiles, "2^78 tiles");
  check_equal(BlockGrid{1 << 16, 1 << 16, 1 << 23, 0}.count(), int64_t(0), "no tile of keys");
  BackwardParams const params = call(15, 1 << 16, 1 << 15, kMaxSeqlen, kMaxSeqlen);
  GradBiasSchedule const schedule = grad_bias_schedule(params, kTile, 264);
  check(grad_bias_ctas(grad_bias_grid(params, kTile), schedule) > kMaxTiles, "CTAs of too many");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_parts();
  check_runs();
  check_no_visits();
  check_schedule();
  check_too_many_tiles();
  return testing::report();
}
