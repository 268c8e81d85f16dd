// test_many_tiles.cpp: compares grids, schedules and offsets with the same sums in 128 bits, for
// the largest number of tiles that kernels serve, and for more. If an int32 overflows, the program
// ends with a signal.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

using Wide = __int128;

constexpr int32_t kCounts[] = {
    0, 1, 2, 3, 64, 65, 1000, 1 << 20, 1 << 24, 1 << 29, 1 << 30, INT32_MAX - 1, INT32_MAX};

void test_tile_count() {
  int above = 0;
  for (int32_t seqlen : kCounts) {
    for (int32_t heads : kCounts) {
      for (int32_t batch : kCounts) {
        for (int32_t tile : {1, 64, 192}) {
          Wide const exact = (Wide(seqlen) + tile - 1) / tile * heads * batch;
          int64_t const got = tile_count(seqlen, tile, heads, batch);
          check_equal(got > kMaxTiles, exact > kMaxTiles, "too many tiles");
          if (exact <= kMaxTiles) check_equal(got, int64_t(exact), "tiles");
          above += exact > kMaxTiles;
        }
      }
    }
  }
  check(above > 1000, "some are too many");
  check_equal(tile_count(-1, 64, 2, 2), int64_t(0), "tiles of nothing");
}

// Shapes with nearly as many tiles of queries as a launch may have.
struct Shape {
  int32_t m_blocks, heads, batch;
  int64_t tiles() const { return int64_t(m_blocks) * heads * batch; }
};
constexpr Shape kLargest[] = {{2147418112, 1, 1}, {16776704, 128, 1}, {1, 32, 67106816},
                              {3, 7, 102258005},  {65533, 32768, 1},  {4, 16, 33553408}};

ForwardParams params_of(Shape const& shape) {
  ForwardParams params{};
  params.batch = shape.batch;
  params.heads = params.heads_kv = shape.heads;
  // The tests use tiles of one row, so that seqlen_q is the number of tiles of a head. It may
  // exceed the longest sequence that the core accepts.
  params.seqlen_q = shape.m_blocks;
  params.seqlen_k = 4096;
  params.head_dim = params.head_dim_v = 64;
  params.window_left = params.window_right = kUnbounded;
  return params;
}

// The indices that the tests look at.
std::vector<int64_t> indices_of(int64_t tiles) {
  std::vector<int64_t> found;
  for (int64_t at : {int64_t(0), tiles / 3, tiles / 2, int64_t(1) << 30, tiles}) {
    for (int64_t index = at - 40; index < at + 40; ++index) {
      if (0 <= index && index < tiles) found.push_back(index);
    }
  }
  return found;
}

void test_work_tiles() {
  for (Shape const& shape : kLargest) {
    check(shape.tiles() <= kMaxTiles && shape.tiles() > kMaxTiles - 70000, "close to the limit");
    ForwardParams const params = params_of(shape);
    check_equal(work_tiles(params, 1), shape.tiles(), "work_tiles");
    for (int64_t index : indices_of(shape.tiles())) {
      WorkTile const work = work_tile(params, 1, int32_t(index));
      check(0 <= work.head && work.head < shape.heads && 0 <= work.m_block &&
                work.m_block < shape.m_blocks,
            "a tile lies in the problem");
      int64_t const head = int64_t(work.batch) * shape.heads + work.head;
      check_equal(head * shape.m_blocks + (shape.m_blocks - 1 - work.m_block), index, "work_tile");
    }
  }
}

// From round `first` on a persistent grid takes `expected` tiles, each of them once, and then ends.
void test_last_rounds(Schedule const& schedule, int32_t ctas, int64_t first, int64_t expected) {
  int64_t taken = 0;
  std::vector<int64_t> keys;
  for (int32_t cta = 0; cta < ctas; ++cta) {
    bool more = true;
    for (int64_t round = first; more; ++round) {
      WorkTile work{};
      if (!schedule.tile(cta, ctas, int32_t(round), work, more)) continue;
      ++taken;
      check(0 <= work.m_block && work.m_block < schedule.m_blocks && 0 <= work.head &&
                work.head < schedule.heads && 0 <= work.batch,
            "a tile of the last rounds lies in the problem");
      int64_t const head = int64_t(work.batch) * schedule.heads + work.head;
      check(head < schedule.all_heads, "its head too");
      keys.push_back(head * schedule.m_blocks + work.m_block);
    }
  }
  std::sort(keys.begin(), keys.end());
  check(std::adjacent_find(keys.begin(), keys.end()) == keys.end(), "a tile is taken once");
  check_equal(taken, expected, "tiles of the last rounds");
}

void test_schedules() {
  for (Shape const& shape : kLargest) {
    int64_t const tiles = shape.tiles();
    int32_t const all_heads = shape.heads * shape.batch;
    int64_t const pairs = (shape.m_blocks + int64_t(1)) / 2;  // of a head
    for (int32_t ctas : {16, 132, 148}) {
      int64_t const first = (tiles + ctas - 1) / ctas - 2;
      for (Order order : {Order::Heads, Order::Longest}) {
        test_last_rounds({order, int32_t(tiles), shape.m_blocks, shape.heads, all_heads}, ctas,
                         first, tiles - first * ctas);
      }
      // As many rounds of pairs as make_schedule() takes at most: what is left is one or two of
      // them.
      int64_t const rounds = pairs * all_heads / ctas - 1;
      Schedule const after{Order::Longest, int32_t(tiles), shape.m_blocks,
                           shape.heads,    all_heads,      int32_t(rounds)};
      int64_t const head = rounds * ctas / pairs, of_head = rounds * ctas % pairs;
      test_last_rounds(after, ctas, 2 * rounds, tiles - head * shape.m_blocks - 2 * of_head);
    }
  }
  // The host counts each packed sequence as long as the longest one, which gives far too many
  // tiles.
  ForwardParams params = params_of({kMaxSeqlen, 128, 1 << 20});
  params.seqlen_k = kMaxSeqlen;
  params.window_right = 0;
  params.head_dim = params.head_dim_v = 256;
  Schedule const schedule = make_schedule(params, 128, 132, 25 << 20);
  check_equal(int64_t(schedule.tiles), kMaxTiles, "tiles in name");
  check_equal(schedule.all_heads, 1 << 27, "all heads");
  check(schedule.order == Order::Longest && schedule.pair_rounds == 0, "nobody takes them so");
}

void test_warps_of_a_grid() {
  for (uint32_t threads : {32u, 128u, 256u, 512u}) {
    int64_t expected = 0;
    for (uint32_t cta = 0; cta < 5; ++cta) {
      for (uint32_t thread = 0; thread < threads; thread += 32, ++expected) {
        for (uint32_t lane : {0u, 31u}) {
          GridWarp const warp = grid_warp(cta, 5, thread + lane, threads);
          check_equal(warp.index, expected, "a warp of a small grid");
          check_equal(warp.count, int64_t(5 * threads / 32), "warps of a small grid");
        }
      }
    }
    uint32_t const ctas = uint32_t(kMaxTiles);
    GridWarp const last = grid_warp(ctas - 1, ctas, threads - 1, threads);
    check_equal(last.count, kMaxTiles * int64_t(threads / 32), "warps of the largest grid");
    check_equal(last.index, last.count - 1, "the last warp of the largest grid");
  }
}

void test_grad_schedules() {
  for (Shape const& shape : kLargest) {
    int64_t const all_heads = int64_t(shape.heads) * shape.batch;
    for (int64_t per_group : {int64_t(1), int64_t(7), all_heads / 2 + 1, all_heads}) {
      if (per_group > all_heads) continue;
      GradSchedule const schedule{shape.m_blocks,     shape.heads,  int32_t(all_heads),
                                  int32_t(per_group), {1, 1, 1, 1}, 132};
      check_equal(schedule.tiles(), shape.tiles(), "tiles of a backward pass");
      for (int64_t index : indices_of(shape.tiles())) {
        GradTile const tile = schedule.tile(int32_t(index));
        int64_t const head = int64_t(tile.batch) * shape.heads + tile.head_kv;
        int64_t const first_head = head / per_group * per_group;
        int64_t const here = std::min(per_group, all_heads - first_head);
        check_equal(first_head * shape.m_blocks + tile.n_block * here + head - first_head, index,
                    "a block of the backward pass");
      }
    }
  }
  BackwardParams params{};
  params.batch = 1 << 10;
  params.heads = 1 << 10;
  params.heads_kv = 1;
  params.seqlen_q = 128 << 10;
  params.seqlen_k = kMaxSeqlen;
  params.head_dim = params.head_dim_v = 256;
  GradSchedule const schedule =
      make_grad_schedule(params, 64, 64, 25 << 20, 132, {whole_blocks(params)});
  check_equal(schedule.tiles(), int64_t(1 << 10) * ((kMaxSeqlen + 63) / 64), "blocks of long keys");
  // One block of keys with nearly as many steps as a launch has tiles, in the most parts.
  int32_t const steps = int32_t(kMaxTiles), parts = 1024;
  MTiles const tiles{0, 0, steps, steps};
  int64_t sum = 0;
  for (int32_t part = 0; part < parts; ++part) {
    sum += steps_of_part(tiles, {0, 0, 0, part}, make_step_parts(1, 1, parts)).count;
  }
  check_equal(sum, kMaxTiles, "steps of all parts");
}

// The offsets of the LSE of a head, and of the blocks with its sums of dQ.
void test_offsets() {
  BackwardParams params{};
  int32_t const cu_seqlens = 0;
  for (int32_t seqlen_q : {1, 1000, 1 << 29, kMaxSeqlen}) {
    for (int32_t heads : {1, 3, 1 << 10}) {
      for (int32_t batch : {1, 5, 1 << 20}) {
        params.batch = batch;
        params.heads = params.heads_kv = heads;
        params.seqlen_q = seqlen_q;
        params.total_q = kMaxPackedRows;
        Sequence const sequence =
            make_sequence(seqlen_q, 1, kMaxPackedRows - seqlen_q, 0, kUnbounded, kUnbounded);
        Wide const blocks = (Wide(seqlen_q) + 63) / 64;
        Wide const all_heads = Wide(heads) * batch;
        params.cu_seqlens_q = nullptr;
        check(Wide(lse_size(params)) == all_heads * seqlen_q, "lse_size");
        Wide const lse = lse_index(params, sequence, batch - 1, heads - 1, 0);
        check(lse == (all_heads - 1) * seqlen_q, "lse_index");
        check(Wide(grad_q_blocks(params, 64).count()) == all_heads * blocks, "grad_q_blocks");
        check(Wide(first_grad_q_block(params, sequence, batch - 1, heads - 1, 64)) ==
                  (all_heads - 1) * blocks,
              "first_grad_q_block");
        params.cu_seqlens_q = &cu_seqlens;
        Wide const packed_blocks = (Wide(kMaxPackedRows) + Wide(batch) * 64) / 64;
        check(Wide(lse_size(params)) == Wide(heads) * kMaxPackedRows, "packed lse_size");
        Wide const packed_lse = lse_index(params, sequence, batch - 1, heads - 1, 0);
        check(packed_lse == Wide(heads) * kMaxPackedRows - seqlen_q, "packed lse_index");
        check(Wide(grad_q_blocks(params, 64).count()) == packed_blocks * heads,
              "packed grad_q_blocks");
        check(Wide(first_grad_q_block(params, sequence, batch - 1, heads - 1, 64)) ==
                  packed_blocks * (heads - 1) +
                      (Wide(kMaxPackedRows) - seqlen_q + Wide(batch - 1) * 64) / 64,
              "packed first_grad_q_block");
      }
    }
  }
}

void test_query_packing() {
  ForwardParams params{};
  for (int32_t seqlen_q : {1, 100, kMaxSeqlen}) {
    for (int32_t group : {1, 3, 64, 1000, 1 << 24}) {
      params.batch = 64;
      params.heads = group;
      params.heads_kv = 1;
      params.seqlen_q = seqlen_q;
      QueryPacking const packing = make_query_packing(params, 192, 64);
      check_equal(int64_t(packing.parts),
                  (int64_t(group) + (1 << packing.shift) - 1) >> packing.shift, "parts of a group");
      check_equal(packing.first_head(packing.parts - 1) + packing.heads(packing.parts - 1), group,
                  "the last part ends the group");
    }
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_tile_count();
  test_work_tiles();
  test_schedules();
  test_warps_of_a_grid();
  test_grad_schedules();
  test_offsets();
  test_query_packing();
  return testing::report();
}
