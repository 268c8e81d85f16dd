// test_kv_tiles.cpp: compares the KV tiles that a tile of queries visits with brute force, for many
// masks, lengths and tiles of short sequences. Also tests the tiles of a grid.
#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

#include "check.h"
#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

// Whether a query sees a key: what the contract in docs/design.md says of windows.
bool sees(int query, int key, int seqlen_q, int seqlen_k, int left, int right) {
  int64_t const position = int64_t(query) + seqlen_k - seqlen_q;
  return key >= 0 && key < seqlen_k && position - left <= key && key <= position + right;
}

struct Visited {
  int n_block;
  bool masked;
};

int check_tile(int seqlen_q, int seqlen_k, int left, int right, int m_begin, int tile_m,
               int tile_n) {
  Sequence const sequence = make_sequence(seqlen_q, seqlen_k, 0, 0, left, right);
  KvTiles const tiles = kv_tiles(sequence, m_begin, tile_m, tile_n);
  std::vector<Visited> visited;
  for (int n_block = tiles.end - 1; n_block >= tiles.begin; --n_block) {
    visited.push_back({n_block, tiles.masked(n_block)});
  }
  int const m_end = std::min(m_begin + tile_m, seqlen_q);
  int needed = 0;
  for (int n_block = 0; n_block * tile_n < seqlen_k; ++n_block) {
    bool any = false, all = (n_block + 1) * tile_n <= seqlen_k;
    for (int query = m_begin; query < m_end; ++query) {
      for (int key = n_block * tile_n; key < (n_block + 1) * tile_n; ++key) {
        bool const visible = sees(query, key, seqlen_q, seqlen_k, left, right);
        any |= visible;
        all &= visible;
      }
    }
    needed += any;
    int times = 0;
    for (Visited const& tile : visited) {
      if (tile.n_block == n_block) {
        ++times;
        check(tile.masked || all, "a tile with hidden keys is masked");
        check(!tile.masked || !all, "a full tile is not masked");
      }
    }
    check(any ? times == 1 : times <= 1, "a needed tile is visited once");
  }
  check(needed > 0 || visited.empty(), "nothing visible, nothing visited");
  for (Visited const& tile : visited) {
    check(tile.n_block >= 0 && tile.n_block * tile_n < seqlen_k, "a tile lies in the sequence");
  }
  return int(visited.size());
}

// What a warpgroup visits that has `part_m` of the tile's queries.
void check_part(int seqlen_q, int seqlen_k, int left, int right, int m_begin, int tile_m,
                int part_begin, int part_m, int tile_n) {
  Sequence const sequence = make_sequence(seqlen_q, seqlen_k, 0, 0, left, right);
  KvTiles const all = kv_tiles(sequence, m_begin, tile_m, tile_n);
  KvTiles const visited = visited_tiles(all, kv_tiles(sequence, part_begin, part_m, tile_n));
  check_equal(visited.begin, all.begin, "a part visits the first tile");
  check(visited.end == all.end || visited.end == all.end - 1, "a part leaves one tile out at most");
  check(all.begin == all.end || visited.begin < visited.end, "a part visits a tile");
  int const part_end = std::min(part_begin + part_m, seqlen_q);
  for (int n_block = all.begin; n_block < all.end; ++n_block) {
    bool any = false, every = (n_block + 1) * tile_n <= seqlen_k;
    for (int query = part_begin; query < part_end; ++query) {
      for (int key = n_block * tile_n; key < (n_block + 1) * tile_n; ++key) {
        bool const visible = sees(query, key, seqlen_q, seqlen_k, left, right);
        any |= visible;
        every &= visible;
      }
    }
    if (n_block >= visited.end) {
      check(!any, "a part leaves out only what it does not see");
    } else {
      check_equal(visited.masked(n_block), !every,
                  "a part masks the tiles that it does not see whole");
    }
  }
}

void test_every_mask_of_a_small_world() {
  int const windows[] = {0, 1, 2, 5, 9, 30, kUnbounded};
  int tiles = 0;
  for (int seqlen_q = 1; seqlen_q <= 13; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k <= 17; ++seqlen_k) {
      for (int left : windows) {
        for (int right : windows) {
          for (int m_begin = 0; m_begin < seqlen_q; m_begin += 4) {
            tiles += check_tile(seqlen_q, seqlen_k, left, right, m_begin, 4, 3);
            for (int part = m_begin; part < std::min(m_begin + 4, seqlen_q); part += 2) {
              check_part(seqlen_q, seqlen_k, left, right, m_begin, 4, part, 2, 3);
            }
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
  KvTiles const last = kv_tiles(causal, longest - 128, 128, 64);
  check_equal(last.begin, 0, "last.begin");
  check_equal(last.end, ceil_div(longest, 64), "last.end");
  KvTiles const first = kv_tiles(causal, 0, 128, 64);
  check_equal(first.begin, 0, "first.begin");
  check_equal(first.end, 2, "first.end");
  KvTiles const unseen = kv_tiles(make_sequence(longest, 1, 0, 0, kUnbounded, 0), 0, 128, 64);
  check_equal(unseen.begin, unseen.end, "unseen.begin");
}

void test_work_tiles_cover_every_head_once() {
  ForwardParams params{};
  params.batch = 3;
  params.heads = 4;
  params.seqlen_q = 300;
  std::set<std::tuple<int, int, int>> seen;
  int const count = int(work_tiles(params, 128));
  check_equal(count, 3 * 4 * 3, "count");
  for (int index = 0; index < count; ++index) {
    WorkTile const work = work_tile(params, 128, index);
    check(work.m_block >= 0 && work.m_block < 3 && work.head >= 0 && work.head < 4 &&
              work.batch >= 0 && work.batch < 3,
          "a work tile lies in the problem");
    seen.insert({work.m_block, work.head, work.batch});
  }
  check_equal(int(seen.size()), count, "different tiles");
  check_equal(work_tile(params, 128, 0).m_block, 2,
              "the longest tile of a causal mask comes first");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_every_mask_of_a_small_world();
  test_long_sequences_do_not_overflow();
  test_work_tiles_cover_every_head_once();
  return testing::report();
}
