// test_group_queries.cpp: a call whose query heads are told as queries reads and writes, row by
// row, what it did; calls in which rows depend on heads or places are left as they are.
#include <functional>
#include <string>

#include "check.h"
#include "cute_attention/core/group_queries.h"
#include "cute_attention/core/key_splits.h"

namespace {

using namespace cute_attention;
using cute_attention::testing::check;
using cute_attention::testing::check_equal;
using cute_attention::testing::report;

ForwardParams step(int32_t batch, int32_t heads, int32_t heads_kv) {
  ForwardParams p{};
  p.batch = batch;
  p.seqlen_q = 1;
  p.seqlen_k = 100;
  p.heads = heads;
  p.heads_kv = heads_kv;
  p.head_dim = p.head_dim_v = 64;
  p.window_left = kUnbounded;
  p.q_stride = {heads * 72, 7, 72};
  p.o_stride = {heads * 80, 5, 80};
  return p;
}

int64_t offset(Strides const& stride, int32_t batch, int32_t row, int32_t head) {
  return batch * stride.batch + row * stride.row + head * stride.head;
}

// The place of a query in the LSE [batch, heads, seqlen_q].
int64_t lse_place(ForwardParams const& p, int32_t batch, int32_t row, int32_t head) {
  return (int64_t(batch) * p.heads + head) * p.seqlen_q + row;
}

void check_rows(int32_t batch, int32_t heads, int32_t heads_kv) {
  ForwardParams const p = step(batch, heads, heads_kv), told = with_groups_as_queries(p);
  int32_t const group = heads / heads_kv;
  std::string const what = std::to_string(heads) + " over " + std::to_string(heads_kv);
  check_equal(told.heads * told.seqlen_q, heads, what + ": rows of a sequence");
  check_equal(told.heads, told.heads_kv, what + ": a head for each KV head");
  check_equal(told.window_right, kUnbounded, what + ": each query sees all keys");
  check_equal(lse_size(told), lse_size(p), what + ": rows");
  check_equal(split_workspace_size(told, 3), split_workspace_size(p, 3), what + ": the workspace");
  for (int32_t b = 0; b < batch; ++b) {
    for (int32_t head = 0; head < heads; ++head) {
      int32_t const kv = head / group, row = head % group;
      check_equal(offset(told.q_stride, b, row, kv), offset(p.q_stride, b, 0, head), what + ": q");
      check_equal(offset(told.o_stride, b, row, kv), offset(p.o_stride, b, 0, head), what + ": o");
      check_equal(lse_place(told, b, row, kv), lse_place(p, b, 0, head), what + ": LSE");
    }
  }
}

void test_others_are_left() {
  float number = 0;
  uint64_t seed = 0;
  int32_t offsets = 0;
  std::pair<char const*, std::function<void(ForwardParams&)>> const changes[] = {
      {"two queries", [](ForwardParams& p) { p.seqlen_q = 2; }},
      {"a KV head for each head", [](ForwardParams& p) { p.heads_kv = p.heads; }},
      {"packed queries", [&](ForwardParams& p) { p.cu_seqlens_q = &offsets; }},
      {"a window", [](ForwardParams& p) { p.window_left = 99; }},
      {"a sink", [&](ForwardParams& p) { p.sink = &number; }},
      {"ALiBi", [&](ForwardParams& p) { p.alibi_slopes.data = &number; }},
      {"a bias", [&](ForwardParams& p) { p.bias.data = &number; }},
      {"dropout", [&](ForwardParams& p) { p.dropout.seed = &seed; }},
      {"qv", [&](ForwardParams& p) { p.qv = &number; }},
      {"bits that depend on nothing else", [](ForwardParams& p) { p.batch_invariant = 1; }},
  };
  for (auto const& [what, change] : changes) {
    ForwardParams p = step(2, 8, 2);
    change(p);
    ForwardParams const told = with_groups_as_queries(p);
    check(told.heads == p.heads && told.seqlen_q == p.seqlen_q &&
              told.q_stride.row == p.q_stride.row && told.window_right == p.window_right,
          what);
  }
}

}  // namespace

int main() {
  for (int32_t batch : {1, 3}) {
    check_rows(batch, 8, 2);
    check_rows(batch, 7, 1);
    check_rows(batch, 200, 1);  // more rows than a tile
  }
  test_others_are_left();
  return report();
}
