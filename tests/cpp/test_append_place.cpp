// test_append_place.cpp: new tokens find their sequence, their place in a cache and their angle,
// and pairs of rotary embeddings are pairs.
#include "layouts/host_cuda.h"  // before everything else

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "cute_attention/core/append_place.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

void test_rows_of_sequences() {
  // Sequences without tokens stand first, between others, and last; three rows belong to none.
  std::vector<int32_t> const lengths = {0, 3, 0, 0, 1, 5, 0};
  std::vector<int32_t> ends = {0};
  for (int32_t const length : lengths) ends.push_back(ends.back() + length);
  int32_t const batch = int32_t(lengths.size());
  int64_t row = 0;
  for (int32_t sequence = 0; sequence < batch; ++sequence) {
    for (int32_t place = 0; place < lengths[sequence]; ++place, ++row) {
      TokenPlace const found = token_place(ends.data(), batch, 0, row);
      check_equal(found.sequence, sequence, "sequence of row " + std::to_string(row));
      check_equal(found.place, place, "place of row " + std::to_string(row));
    }
  }
  for (; row < ends.back() + 3; ++row) {
    check_equal(token_place(ends.data(), batch, 0, row).sequence, -1, "a row of no sequence");
  }
  for (row = 0; row < 20; ++row) {
    TokenPlace const dense = token_place(nullptr, 5, 4, row);
    check_equal(dense.sequence * 4 + dense.place, int32_t(row), "a row that is not packed");
  }
  AppendParams params{};
  params.seqlen_new = 7;
  check_equal(new_tokens(params, 3), 7, "new tokens");
  params.cu_seqlens_new = ends.data();
  check_equal(new_tokens(params, 5), 5, "new tokens of a packed sequence");
}

void test_places() {
  std::vector<int32_t> const rows = {2, 0};
  std::vector<int32_t> const table = {4, 1, -1, /**/ 9, 9, 9, /**/ 0, 5, 3};
  KeyCache cache{};
  cache.batch_idx = rows.data();
  cache.block_table = table.data();
  cache.block_table_stride = 3;
  cache.pages_per_sequence = 3;
  cache.page_size = 16;
  cache.pages = 5;
  auto const at = [&](int32_t sequence, int64_t token) {
    CachePlace const place = cache_place(cache, sequence, token);
    return place.page < 0 ? -1 : place.page * 100 + place.row;
  };
  check_equal(at(0, 0), 0, "the first token");
  check_equal(at(0, 15), 15, "the last of a page");
  check_equal(at(0, 16), -1, "a page that the cache does not have");
  check_equal(at(0, 47), 315, "the last token");
  check_equal(at(0, 48), -1, "no room");
  check_equal(at(0, int64_t(INT32_MAX) + 5), -1, "no room for a long sequence");
  check_equal(at(0, -1), -1, "before the first token");
  check_equal(at(1, 3), 403, "another row");
  check_equal(at(1, 40), -1, "an entry for no page");
  cache.block_table = nullptr;
  cache.pages_per_sequence = 1;
  check_equal(at(0, 7), 207, "a cache without pages");
  check_equal(at(0, 16), -1, "its end");
  cache.batch_idx = nullptr;
  check_equal(at(4, 7), 407, "rows in order");
  check_equal(at(5, 7), -1, "no row");
}

void test_angles() {
  RotaryOptions rotary{};
  rotary.positions = 10;
  check_equal(angle_row(rotary, 3, 4), 7, "an angle");
  check_equal(angle_row(rotary, 9, 1), 9, "past the last one");
  check_equal(angle_row(rotary, INT32_MAX, INT32_MAX), 9, "far past the last one");
  check_equal(angle_row(rotary, -5, 2), 0, "before the first one");
  for (int32_t const dim : {2, 20, 64}) {
    for (int32_t const interleaved : {0, 1}) {
      rotary.rotary_dim = dim;
      rotary.is_interleaved = interleaved;
      std::vector<int> turned(dim / 2, 0);
      for (int32_t col = 0; col < dim; ++col) {
        RotaryPair const pair = rotary_pair(rotary, col);
        RotaryPair const other = rotary_pair(rotary, pair.partner);
        check(pair.partner >= 0 && pair.partner < dim && pair.partner != col, "a partner");
        check(other.partner == col && other.angle == pair.angle, "a pair has one angle");
        check(pair.is_first == (col < pair.partner) && other.is_first != pair.is_first,
              "its first");
        check_equal(pair.partner - col, (pair.is_first ? 1 : -1) * (interleaved ? 1 : dim / 2),
                    "which numbers are a pair");
        ++turned[pair.angle];
      }
      for (int const count : turned) check_equal(count, 2, "every angle turns one pair");
    }
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_rows_of_sequences();
  test_places();
  test_angles();
  return testing::report();
}
