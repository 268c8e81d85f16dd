// test_key_pages.cpp: compares where the keys of a tile come from with brute force, for pages and
// tiles of many sizes. A table has entries only for pages that hold keys which a query sees.
#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "cute_attention/core/key_pages.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr int kNoEntry = -1;

struct Problem {
  int seqlen_q, seqlen_k, left, right, page_size;
};

// A table whose second row is the sequence's, with a page of its own for each key that may be read.
struct Table {
  int width;
  std::vector<int32_t> entries;
  KeyCache cache{};

  explicit Table(Problem const& p)
      : width(p.seqlen_k / p.page_size + 2), entries(2 * width, kNoEntry) {
    // The keys from the window of the first query on.
    int const first = std::max(p.seqlen_k - p.seqlen_q - p.left, 0);
    for (int key = first; key < p.seqlen_k; ++key) {
      int const index = key / p.page_size;
      entries[width + index] = 1000 - 7 * index;
    }
    cache.block_table = entries.data();
    cache.block_table_stride = width;
    cache.pages_per_sequence = width;
    cache.page_size = p.page_size;
  }
  int page(int key) const { return entries[width + key / cache.page_size]; }
};

bool sees(Problem const& p, int query, int key) {
  int const position = query + p.seqlen_k - p.seqlen_q;
  return key >= position - p.left && key <= position + p.right;
}

// Loads the KV tiles of a tile of queries in boxes of `rows` rows.
void check_tile(Problem const& p, Table const& table, int m_begin, int tile_m, int tile_n,
                int rows) {
  Sequence const sequence = make_sequence(p.seqlen_q, p.seqlen_k, 0, 0, p.left, p.right);
  KvTiles const tiles = kv_tiles(sequence, m_begin, tile_m, tile_n);
  check(rows % kPageRows == 0 && p.page_size % rows == 0 && tile_n % rows == 0, "size of a box");
  int const first = first_visible_key(sequence, m_begin);
  std::set<int> loaded;
  for (int n_block = tiles.begin; n_block < tiles.end; ++n_block) {
    int const n_begin = n_block * tile_n;
    KeyRange const boxes = key_boxes(sequence, first, n_begin, tile_n, rows);
    check(0 <= boxes.begin && boxes.begin < boxes.end && boxes.end <= tile_n / rows,
          "a tile that is visited has boxes");
    KeyRange const keys = key_rows(sequence, first_loaded_key(first, rows), n_begin, tile_n);
    check_equal(keys.begin, boxes.begin * rows, "the boxes begin with the first key");
    check_equal(ceil_div(keys.end, rows), boxes.end, "the last key is in the last box");
    for (int box = boxes.begin; box < boxes.end; ++box) {
      int const key = n_begin + box * rows;
      PageRow const place = page_row(table.cache, 1, key);
      check(place.page != kNoEntry, "an entry that the sequence does not need is not read");
      check_equal(place.row, key % p.page_size, "row of a box");
      for (int i = 0; i < rows; ++i) {
        check_equal(place.page, (key + i) < p.seqlen_k ? table.page(key + i) : place.page, "page");
        check(place.row + i < p.page_size && (key + i) % p.page_size == place.row + i, "row");
        loaded.insert(key + i);
      }
    }
  }
  for (int query = m_begin; query < std::min(m_begin + tile_m, p.seqlen_q); ++query) {
    for (int key = 0; key < p.seqlen_k; ++key) {
      if (sees(p, query, key)) check(loaded.count(key) == 1, "a visible key is loaded");
    }
  }
}

void test_pages() {
  for (int const page_size : {16, 32, 48, 64, 80, 256, 1024}) {
    for (int const tile_n : {32, 64, 80, 96, 128, 176}) {
      for (int const seqlen_k : {0, 1, 15, 16, 17, 47, 48, 64, 65, 128, 255, 300}) {
        for (auto const& [left, right] : {std::pair{kUnbounded, kUnbounded},
                                          {kUnbounded, 0},
                                          {0, 0},
                                          {20, 3},
                                          {100, 0},
                                          {5, kUnbounded}}) {
          for (int const seqlen_q : {1, 3, 70, 150}) {
            int const clipped_left = std::min(left, 1 << 20),
                      clipped_right = std::min(right, 1 << 20);
            Problem const p{seqlen_q, seqlen_k, clipped_left, clipped_right, page_size};
            Table const table(p);
            for (int m_begin = 0; m_begin < seqlen_q; m_begin += 64) {
              check_tile(p, table, m_begin, 64, tile_n, page_box_rows(page_size, tile_n));  // sm90
              check_tile(p, table, m_begin, 64, tile_n, kPageRows);                         // sm80
            }
          }
        }
      }
    }
  }
}

void test_boxes() {
  check_equal(page_box_rows(1 << 20, 128), 128, "a page of whole tiles");
  check_equal(page_box_rows(48, 128), 16, "a page of no whole tiles");
  check_equal(page_box_rows(16, 256), 16, "the smallest page");
}

void test_rows_of_a_cache() {
  ForwardParams params{};
  check_equal(cache_row(params, 7), 7, "no batch_idx");
  int32_t const rows[] = {4, 0, 9};
  params.cache.batch_idx = rows;
  check_equal(cache_row(params, 2), 9, "batch_idx");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_pages();
  cute_attention::test_boxes();
  cute_attention::test_rows_of_a_cache();
  return cute_attention::testing::report();
}
