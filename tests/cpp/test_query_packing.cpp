// test_query_packing.cpp: tiles that hold several query heads of one KV head contain every query of
// every head once, and the packing that is chosen takes the fewest tiles.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "cute_attention/core/query_packing.h"

namespace {

using namespace cute_attention;
using cute_attention::testing::check;
using cute_attention::testing::check_equal;
using cute_attention::testing::report;

ForwardParams problem(int32_t seqlen_q, int32_t heads, int32_t heads_kv, int32_t batch = 1) {
  ForwardParams params{};
  params.batch = batch;
  params.seqlen_q = seqlen_q;
  params.heads = heads;
  params.heads_kv = heads_kv;
  return params;
}

void check_every_query_once(QueryPacking const& packing, int32_t seqlen_q, int32_t heads_kv,
                            int32_t rows) {
  int32_t const heads = packing.group * heads_kv;
  std::vector<int> seen(size_t(seqlen_q) * heads, 0);
  for (int32_t index = 0; index < heads_kv * packing.parts; ++index) {
    int32_t const first_head = packing.first_head(index);
    int32_t const last_head = first_head + packing.heads(index) - 1;
    check_equal(first_head / packing.group, index / packing.parts, "the KV head of the first");
    check_equal(last_head / packing.group, index / packing.parts, "the KV head of the last");
    for (int32_t begin = 0; begin < seqlen_q; begin += packing.queries(rows)) {
      for (int32_t row = 0; row < rows; ++row) {
        int32_t const query = begin + packing.query(row), head = first_head + packing.head(row);
        if (query < seqlen_q && head <= last_head) {
          ++seen[size_t(head) * seqlen_q + query];
        }
      }
    }
  }
  check(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 1; }),
        "every query of every head once");
}

}  // namespace

int main() {
  for (int32_t group : {1, 2, 3, 4, 5, 7, 8, 12, 64, 71, 128}) {
    for (int32_t seqlen_q : {1, 2, 3, 16, 63, 64, 65, 130}) {
      for (int32_t rows : {64, 128, 192}) {
        ForwardParams const params = problem(seqlen_q, 3 * group, 3);
        QueryPacking const chosen = make_query_packing(params, rows, 64);
        for (int32_t shift = 0; shift <= 6; ++shift) {
          QueryPacking const packing{shift, group, ceil_div(group, 1 << shift)};
          check_every_query_once(packing, seqlen_q, 3, rows);
          if (1 << shift < 2 * group) {
            check(packed_tiles(params, rows, chosen) <= packed_tiles(params, rows, packing),
                  "the fewest tiles");
          }
        }
      }
    }
  }
  // In decoding, a tile holds all heads of a group. A head of a long sequence fills tiles alone. If
  // each KV head has one query head, there is nothing to pack.
  check_equal(make_query_packing(problem(1, 32, 4), 128, 64).shift, 3, "decoding");
  check_equal(make_query_packing(problem(1, 28, 4), 128, 64).shift, 3, "decoding, a group of 7");
  check_equal(make_query_packing(problem(1, 128, 1), 128, 64).parts, 2, "more heads than rows");
  check_equal(make_query_packing(problem(8192, 64, 8), 128, 64).shift, 0, "a long sequence");
  check_equal(make_query_packing(problem(1, 8, 8), 128, 64).shift, 0, "no group");
  check_equal(make_query_packing(problem(90, 8, 2), 128, 64).shift, 2,
              "less than a tile of queries");

  // 64 sequences have 32768 tokens together, but the longest has 2048. With several heads in a
  // tile, fewer rows of the last tiles stay empty.
  ForwardParams packed = problem(2048, 16, 2, 64);
  int32_t const offsets = 0;
  packed.cu_seqlens_q = &offsets;  // only compared with null
  packed.total_q = 32768;
  check_equal(make_query_packing(packed, 128, 64).shift, 3, "packed sequences");
  return report();
}
