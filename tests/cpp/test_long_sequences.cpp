// test_long_sequences.cpp: compares tile ranges and masks of the longest sequences that kernels
// serve with the contract, computed in 64 bits. If an int32 overflows, the program ends with a
// signal.
#include "layouts/host_cuda.h"  // before everything else

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/mask.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

// 715,827,883 is the smallest number whose triple is more than 2^31.
constexpr int32_t kLengths[] = {1,         2,         1000,      1 << 29,        (1 << 29) + 1,
                                715827882, 715827883, 715827979, kMaxSeqlen - 1, kMaxSeqlen};
constexpr int32_t kWindows[] = {0,          1,       100,           1 << 29,   715827883,
                                kMaxSeqlen, 1 << 30, INT32_MAX - 1, kUnbounded};

constexpr std::pair<int32_t, int32_t> kTiles[] = {{128, 64}, {192, 128}, {64, 80}};

struct Mask {
  int64_t seqlen_q, seqlen_k, left, right;

  int64_t shift() const { return seqlen_k - seqlen_q; }
  Sequence sequence() const {
    return make_sequence(int32_t(seqlen_q), int32_t(seqlen_k), 0, 0, int32_t(left), int32_t(right));
  }
  std::string text() const {
    return std::to_string(seqlen_q) + " x " + std::to_string(seqlen_k) + ", window " +
           std::to_string(left) + ", " + std::to_string(right);
  }
};

// [begin, end); empty where end <= begin.
struct Range {
  int64_t begin, end;
  bool empty() const { return end <= begin; }
};

// What the contract in docs/design.md says of windows.
Range keys_of_query(Mask const& mask, int64_t query) {
  int64_t const position = query + mask.shift();
  return {std::max<int64_t>(position - mask.left, 0),
          std::min(position + mask.right + 1, mask.seqlen_k)};
}
Range queries_of_key(Mask const& mask, int64_t key) {
  int64_t const position = key - mask.shift();
  return {std::max<int64_t>(position - mask.right, 0),
          std::min(position + mask.left + 1, mask.seqlen_q)};
}

// Ranges of keys that rows of a tile see: a range from the first to the last key that some row
// sees, and the keys that all rows see. Likewise for the queries that see keys.
struct Seen {
  Range some{INT64_MAX, 0};
  Range all{0, INT64_MAX};

  void add(Range const& range) {
    if (!range.empty()) some = {std::min(some.begin, range.begin), std::max(some.end, range.end)};
    all = {std::max(all.begin, range.begin), std::min(all.end, range.end)};
  }
};

// The blocks that the test looks at: those near the ends of the range, and near the ends of the
// range of full blocks.
std::vector<int64_t> blocks_near(Range const& blocks, Seen const& seen, int64_t tile) {
  std::vector<int64_t> near;
  for (int64_t at : {blocks.begin, blocks.end, seen.all.begin / tile, seen.all.end / tile}) {
    for (int64_t block = at - 2; block <= at + 2; ++block) {
      if (blocks.begin <= block && block < blocks.end) near.push_back(block);
    }
  }
  return near;
}

template <class Tiles>
void check_range(Tiles const& tiles, Seen const& seen, int64_t tile, std::string const& what) {
  Range const expected = seen.some.empty()
                             ? Range{0, 0}
                             : Range{seen.some.begin / tile, (seen.some.end - 1) / tile + 1};
  check_equal(tiles.end - tiles.begin, expected.end - expected.begin, "number of tiles, " + what);
  if (!seen.some.empty()) check_equal(tiles.begin, expected.begin, "first tile, " + what);
}

void check_kv_tiles(Mask const& mask, int64_t m_begin, int32_t tile_m, int32_t tile_n) {
  KvTiles const tiles = kv_tiles(mask.sequence(), int32_t(m_begin), tile_m, tile_n);
  Seen seen;
  for (int64_t i = m_begin; i < std::min(m_begin + tile_m, mask.seqlen_q); ++i) {
    seen.add(keys_of_query(mask, i));
  }
  std::string const what = "kv_tiles of queries from " + std::to_string(m_begin) + ", " +
                           mask.text() + ", tiles of " + std::to_string(tile_n);
  check_range(tiles, seen, tile_n, what);
  for (int64_t block : blocks_near({tiles.begin, tiles.end}, seen, tile_n)) {
    bool const full = seen.all.begin <= block * tile_n && (block + 1) * tile_n <= seen.all.end;
    check_equal(tiles.masked(int32_t(block)), !full,
                "masked " + std::to_string(block) + ", " + what);
  }
}

void check_m_tiles(Mask const& mask, int64_t n_begin, int32_t tile_n, int32_t tile_m) {
  MTiles const tiles = m_tiles(mask.sequence(), int32_t(n_begin), tile_n, tile_m);
  Seen seen;
  for (int64_t j = n_begin; j < std::min(n_begin + tile_n, mask.seqlen_k); ++j) {
    seen.add(queries_of_key(mask, j));
  }
  std::string const what = "m_tiles of keys from " + std::to_string(n_begin) + ", " + mask.text() +
                           ", tiles of " + std::to_string(tile_m);
  check_range(tiles, seen, tile_m, what);
  for (int64_t block : blocks_near({tiles.begin, tiles.end}, seen, tile_m)) {
    bool const full = n_begin + tile_n <= mask.seqlen_k && seen.all.begin <= block * tile_m &&
                      (block + 1) * tile_m <= seen.all.end;
    check_equal(tiles.masked(int32_t(block)), !full,
                "masked " + std::to_string(block) + ", " + what);
  }
}

// Where the tiles begin that the test looks at: the first two, the last two, the one in the middle,
// and the one at a third of the length.
std::vector<int64_t> beginnings(int64_t seqlen, int32_t tile) {
  std::vector<int64_t> found;
  int64_t const last = (seqlen - 1) / tile;
  for (int64_t block : {int64_t(0), int64_t(1), last / 3, last / 2, last - 1, last}) {
    if (0 <= block && block <= last) found.push_back(block * tile);
  }
  return found;
}

template <class Body>
void for_each_mask(Body const& body) {
  for (int32_t seqlen_q : kLengths) {
    for (int32_t seqlen_k : kLengths) {
      for (int32_t left : kWindows) {
        for (int32_t right : kWindows) body(Mask{seqlen_q, seqlen_k, left, right});
      }
    }
  }
}

void test_tile_ranges() {
  for_each_mask([](Mask const& mask) {
    for (auto const& [tile_m, tile_n] : kTiles) {
      for (int64_t begin : beginnings(mask.seqlen_q, tile_m)) {
        check_kv_tiles(mask, begin, tile_m, tile_n);
      }
      for (int64_t begin : beginnings(mask.seqlen_k, tile_n)) {
        check_m_tiles(mask, begin, tile_n, tile_m);
      }
    }
  });
}

constexpr int kRows = 16;
constexpr int kCols = 16;

// Checks which scores `hide` hides in a tile that one thread holds alone. With `missing`, `hide`
// must hide the queries past the end of the sequence and no others. Without it, `hide` must hide
// the keys that a query does not see. It may then hide queries past the end or not, but must not
// overflow.
template <class Hide>
void check_mask(Mask const& mask, int64_t m_begin, int64_t n_begin, int32_t shift, Hide const& hide,
                bool missing = false) {
  using namespace cute;
  auto storage = make_tensor<float>(Shape<Int<kRows>, Int<kCols>>{});
  clear(storage);
  Tensor scores = make_tensor(storage.data(), storage.layout());
  Tensor coords = make_identity_tensor(storage.shape());
  Sequence const sequence = mask.sequence();
  QueryPacking const packing{shift, 4, 1};
  hide(ScoreTile<kRows, kCols, decltype(scores), decltype(coords)>{
      scores, coords, sequence, packing, int32_t(m_begin), int32_t(n_begin)});
  int wrong = 0;
  for (int row = 0; row < kRows; ++row) {
    int64_t const query = m_begin + (row >> shift);
    Range const keys = keys_of_query(mask, query);
    for (int col = 0; col < kCols && (missing || query < mask.seqlen_q); ++col) {
      bool const visible =
          missing ? query < mask.seqlen_q : keys.begin <= n_begin + col && n_begin + col < keys.end;
      wrong += (scores(row, col) == 0.f) != visible;
    }
  }
  check_equal(wrong, 0,
              "scores masked wrongly, " + mask.text() + ", from query " + std::to_string(m_begin) +
                  " and key " + std::to_string(n_begin));
}

void test_masks() {
  for_each_mask([](Mask const& mask) {
    for (int64_t m_begin : beginnings(mask.seqlen_q, kRows)) {
      std::vector<int64_t> places = beginnings(mask.seqlen_k, kCols);
      Range const keys = keys_of_query(mask, m_begin);
      if (!keys.empty()) {  // the tiles where the first query's keys begin and end
        places.push_back(keys.begin / kCols * kCols);
        places.push_back((keys.end - 1) / kCols * kCols);
      }
      for (int64_t n_begin : places) {
        for (int32_t shift : {0, 2}) {
          auto const check_hidden = [&](auto const& hide, bool missing) {
            check_mask(mask, m_begin, n_begin, shift, hide, missing);
          };
          check_hidden([](auto const& tile) { mask_scores(tile); }, false);
          check_hidden([](auto const& tile) { mask_scores_by_side(tile); }, false);
          check_hidden([](auto const& tile) { mask_missing_queries(tile); }, true);
        }
      }
    }
  });
}

// The offsets of a sequence must give each query the same keys as its window. Checked for the first
// query, one in the middle and the last.
void test_offsets() {
  for_each_mask([](Mask const& mask) {
    Sequence const sequence = mask.sequence();
    check(sequence.first_offset >= -(1 << 30) && sequence.first_offset <= 1 << 30,
          "first_offset in range, " + mask.text());
    check(sequence.last_offset >= -(1 << 30) && sequence.last_offset <= 1 << 30,
          "last_offset in range, " + mask.text());
    for (int64_t query : {int64_t(0), mask.seqlen_q / 2, mask.seqlen_q - 1}) {
      Range const keys = keys_of_query(mask, query);
      Range const got{std::max<int64_t>(query + sequence.first_offset, 0),
                      std::min<int64_t>(query + sequence.last_offset + 1, mask.seqlen_k)};
      check_equal(got.empty(), keys.empty(), "sees no key, " + mask.text());
      if (keys.empty()) continue;
      check_equal(got.begin, keys.begin, "first key, " + mask.text());
      check_equal(got.end, keys.end, "last key, " + mask.text());
    }
  });
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_offsets();
  cute_attention::test_tile_ranges();
  cute_attention::test_masks();
  return cute_attention::testing::report();
}
