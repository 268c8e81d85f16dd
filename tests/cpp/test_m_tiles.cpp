// test_m_tiles.cpp: compares the tiles of queries that a block of keys visits with brute force, for
// many masks, lengths and tiles of short sequences. Also tests the order of the blocks, and where
// the sums of dQ lie.
#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/core/m_tiles.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

// Whether a query sees a key: what the contract in docs/design.md says of windows.
bool sees(int query, int key, int seqlen_q, int seqlen_k, int left, int right) {
  int64_t const position = int64_t(query) + seqlen_k - seqlen_q;
  return key >= 0 && key < seqlen_k && position - left <= key && key <= position + right;
}

int check_block(int seqlen_q, int seqlen_k, int left, int right, int n_begin, int tile_n,
                int tile_m) {
  Sequence const sequence = make_sequence(seqlen_q, seqlen_k, 0, 0, left, right);
  MTiles const tiles = m_tiles(sequence, n_begin, tile_n, tile_m);
  int needed = 0;
  for (int m_block = 0; m_block * tile_m < seqlen_q; ++m_block) {
    int const m_end = std::min((m_block + 1) * tile_m, seqlen_q);
    bool any = false;
    bool all = n_begin + tile_n <= seqlen_k && (m_block + 1) * tile_m <= seqlen_q;
    for (int query = m_block * tile_m; query < m_end; ++query) {
      for (int key = n_begin; key < n_begin + tile_n; ++key) {
        bool const visible = sees(query, key, seqlen_q, seqlen_k, left, right);
        any |= visible;
        all &= visible;
      }
    }
    needed += any;
    bool const visited = tiles.begin <= m_block && m_block < tiles.end;
    check(visited || !any, "a needed tile is visited");
    if (visited) {
      check_equal(tiles.masked(m_block), !all, "a tile is masked where a score is hidden");
    }
    // Where dQ is summed in order, the turns count the blocks of keys that add to a tile of
    // queries. They are right only if kv_tiles() and m_tiles() agree on which tiles and blocks
    // meet.
    KvTiles const keys = kv_tiles(sequence, m_block * tile_m, tile_m, tile_n);
    int const n_block = n_begin / tile_n;
    check_equal(visited, keys.begin <= n_block && n_block < keys.end,
                "a tile of queries and a block of keys agree on whether they meet");
  }
  check(needed > 0 || tiles.count() == 0, "nothing visible, nothing visited");
  check(tiles.begin >= 0 && (tiles.end - 1) * tile_m < seqlen_q, "tiles lie in the sequence");
  check(tiles.begin <= tiles.full_begin && tiles.full_begin <= tiles.full_end &&
            tiles.full_end <= tiles.end,
        "the ranges are in order");
  return tiles.count();
}

void test_every_mask_of_a_small_world() {
  int const windows[] = {0, 1, 2, 5, 9, 30, kUnbounded};
  int tiles = 0;
  for (int seqlen_q = 0; seqlen_q <= 13; ++seqlen_q) {
    for (int seqlen_k = 1; seqlen_k <= 17; ++seqlen_k) {
      for (int left : windows) {
        for (int right : windows) {
          for (int n_begin = 0; n_begin < seqlen_k; n_begin += 4) {
            tiles += check_block(seqlen_q, seqlen_k, left, right, n_begin, 4, 3);
          }
        }
      }
    }
  }
  check(tiles > 10000, "the world is not empty");
}

void test_long_sequences_do_not_overflow() {
  int const longest = kMaxSeqlen;
  Sequence const causal = make_sequence(longest, longest, 0, 0, kUnbounded, 0);
  MTiles const first = m_tiles(causal, 0, 128, 64);
  check_equal(first.begin, 0, "first.begin");
  check_equal(first.full_begin, 2, "first.full_begin");
  check_equal(first.full_end, longest / 64, "first.full_end");
  check_equal(first.end, ceil_div(longest, 64), "first.end");
  MTiles const last = m_tiles(causal, (longest - 1) / 128 * 128, 128, 64);
  check_equal(last.begin, (longest - 1) / 128 * 2, "last.begin");
  check_equal(last.end, ceil_div(longest, 64), "last.end");
}

BackwardParams problem() {
  BackwardParams params{};
  params.batch = 3;
  params.heads = 8;
  params.heads_kv = 4;
  params.seqlen_q = 300;
  params.seqlen_k = 500;
  params.head_dim = params.head_dim_v = 64;
  return params;
}

void test_schedule_covers_every_block_once() {
  int32_t turn = 0;
  for (int64_t l2_bytes : {int64_t(0), int64_t(2000000), int64_t(1) << 40}) {
    for (bool in_turn : {false, true}) {
      BackwardParams params = problem();
      params.grad_q_turn = in_turn ? &turn : nullptr;
      GradSchedule const schedule =
          make_grad_schedule(params, 64, 128, l2_bytes, 5, {whole_blocks(params)});
      check_equal(schedule.tiles(), int64_t(4 * 4 * 3), "tiles");
      std::set<std::tuple<int, int, int>> seen;
      for (int index = 0; index < schedule.tiles(); ++index) {
        GradTile const tile = schedule.tile(index);
        check(tile.n_block >= 0 && tile.n_block < 4 && tile.head_kv >= 0 && tile.head_kv < 4 &&
                  tile.batch >= 0 && tile.batch < 3,
              "a block lies in the problem");
        seen.insert({tile.n_block, tile.head_kv, tile.batch});
        // A CTA waits for the CTAs of the blocks before its own, so these must have started before.
        check(tile.n_block == 0 || seen.count({tile.n_block - 1, tile.head_kv, tile.batch}) == 1,
              "the blocks of a head come in order");
      }
      check_equal(int64_t(seen.size()), schedule.tiles(), "different blocks");
    }
  }
}

void test_groups_of_heads() {
  BackwardParams params = problem();
  params.batch = 16;  // 64 KV heads of 4 blocks of keys; a query head has 300 * 512 bytes
  params.window_left = params.window_right = kUnbounded;
  int64_t const head_bytes = 300 * 512;
  auto const heads = [&params](int64_t l2_bytes, int ctas) {
    return make_grad_schedule(params, 64, 128, l2_bytes, ctas, {whole_blocks(params)})
        .heads_per_group;
  };
  check_equal(heads(7 * head_bytes, 6), 7, "as many as fit, where the one that is left is enough");
  check_equal(heads(7 * head_bytes, 24), 8, "eight groups of 8, not nine of 7 and one of 1");
  check_equal(heads(6 * head_bytes, 24), 8, "nor ten of 6 and one of 4");
  check_equal(heads(0, 4), 1, "one head at least");
  check_equal(heads(0, 129), 64, "all where a CTA has less than two of the 256 blocks");
  check_equal(heads(64 * head_bytes, 100), 64, "all at most");
  int32_t turn = 0;
  params.grad_q_turn = &turn;  // 5 steps of 64 queries: 132 CTAs / 4 CTAs of a head + 1 is 34
  check_equal(heads(0, 132), 64, "in order");
  params.batch = 64;
  check_equal(heads(0, 132), 37, "in order: six groups of 37 and one of 34, none of 18");
}

void test_packed_blocks_do_not_overlap() {
  int const tile_m = 64;
  std::vector<int> const lengths = {0, 1, 64, 63, 0, 65, 200, 128, 5};
  BackwardParams params = problem();
  int32_t const cu_seqlens = 0;
  params.cu_seqlens_q = &cu_seqlens;
  params.batch = int(lengths.size());
  for (int length : lengths) params.total_q += length;
  std::set<int64_t> seen;
  int64_t expected = 0;
  for (int head = 0; head < params.heads; ++head) {
    int row = 0;
    for (int batch = 0; batch < params.batch; ++batch) {
      Sequence const sequence = make_sequence(lengths[batch], 9, row, 0, kUnbounded, kUnbounded);
      int64_t const first = first_grad_q_block(params, sequence, batch, head, tile_m);
      for (int m_block = 0; m_block * tile_m < lengths[batch]; ++m_block, ++expected) {
        seen.insert(first + m_block);
      }
      row += lengths[batch];
    }
  }
  check_equal(int64_t(seen.size()), expected, "blocks of their own");
  check(*seen.begin() >= 0 && *seen.rbegin() < grad_q_blocks(params, tile_m).count(),
        "inside the workspace");
}

void test_dense_blocks_do_not_overlap() {
  BackwardParams const params = problem();
  Sequence const sequence = make_sequence(300, 500, 0, 0, kUnbounded, kUnbounded);
  std::set<int64_t> seen;
  for (int batch = 0; batch < 3; ++batch) {
    for (int head = 0; head < 8; ++head) {
      for (int m_block = 0; m_block < 5; ++m_block) {
        seen.insert(first_grad_q_block(params, sequence, batch, head, 64) + m_block);
      }
    }
  }
  check_equal(int64_t(seen.size()), grad_q_blocks(params, 64).count(), "blocks of their own");
  check_equal(*seen.rbegin(), grad_q_blocks(params, 64).count() - 1, "inside the workspace");
}

// The numbers of a head of a sequence begin at a multiple of kNumberRows, there is room for those
// of all of its tiles, and nobody else has them.
void check_numbers(BackwardParams const& params, std::vector<int32_t> const& begins) {
  std::set<int64_t> seen;
  int64_t expected = 0;
  for (int batch = 0; batch < params.batch; ++batch) {
    int32_t const queries = begins[batch + 1] - begins[batch];
    Sequence const sequence = make_sequence(
        queries, queries, params.cu_seqlens_q == nullptr ? 0 : begins[batch], 0, 1 << 30, 1 << 30);
    int32_t const rows = ceil_div(queries, kNumberRows) * kNumberRows;
    for (int head = 0; head < params.heads; ++head, expected += rows) {
      int64_t const first = number_index<true>(params, sequence, batch, head, 0);
      check_equal(first % kNumberRows, 0, "where the numbers of a head begin");
      for (int query = 0; query < rows; ++query) {
        seen.insert(number_index<true>(params, sequence, batch, head, query));
      }
    }
  }
  check_equal(int64_t(seen.size()), expected, "numbers of their own");
  check_equal(*seen.rbegin() < numbers_size<true>(params), true, "inside the workspace");
}

void test_numbers() {
  BackwardParams params = problem();
  std::vector<int32_t> begins;
  for (int batch = 0; batch <= params.batch; ++batch) {
    begins.push_back(batch * params.seqlen_q);
  }
  check_numbers(params, begins);
  begins = {0, 1, 1, 300};
  params.batch = 3;
  params.cu_seqlens_q = begins.data();
  params.total_q = 310;
  check_numbers(params, begins);
}

void test_workspace() {
  BackwardParams params = problem();
  int64_t const queries =
      int64_t(params.batch) * params.heads * ceil_div(params.seqlen_q, 128) * 128;
  BackwardWorkspace const dense = grad_workspace<true>(params, {64, 128, 96, 64}, 0);
  check_equal(dense.delta, 2 * queries, "two numbers a query, of whole tiles");
  check_equal(grad_workspace<false>(params, {64, 128, 96, 64}, 0).delta,
              2 * int64_t(params.batch) * params.heads * params.seqlen_q, "two numbers a query");
  check_equal(dense.grad_q_turn, grad_q_blocks(params, 64).count(), "a turn for each block");
  check_equal(dense.grad_q_sum, grad_q_blocks(params, 64).count() * 64 * 96,
              "a tile for each block");
  int32_t const offsets[1] = {0};  // not read
  params.cu_seqlens_q = offsets;
  params.total_q = 1000;
  BackwardWorkspace const packed = grad_workspace<true>(params, {64, 128, 96, 64}, 0);
  check_equal(packed.delta, 2 * (1000 / 128 + params.batch) * 128 * params.heads,
              "two numbers a packed query, of whole tiles");
  check_equal(packed.grad_q_sum, grad_q_blocks(params, 64).count() * 64 * 96,
              "a tile for each block");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_every_mask_of_a_small_world();
  test_long_sequences_do_not_overflow();
  test_schedule_covers_every_block_once();
  test_groups_of_heads();
  test_packed_blocks_do_not_overlap();
  test_dense_blocks_do_not_overlap();
  test_numbers();
  test_workspace();
  return testing::report();
}
