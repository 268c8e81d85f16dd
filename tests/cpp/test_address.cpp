// test_address.cpp: compares the addresses of rows and of their LSE with the positions that one
// gets by counting through a tensor element by element.
#include <vector>

#include "check.h"
#include "cute_attention/core/address.h"

namespace cute_attention {
namespace {

using testing::check_equal;

constexpr int kBatch = 3, kHeads = 4, kHeadDim = 5;

// Checks every row of a tensor [batch, seqlen, heads, head_dim]: of a contiguous one, and of one in
// which all rows of a head lie together.
void check_dense_rows() {
  constexpr int kSeqlen = 7;
  std::vector<int> tensor(kBatch * kSeqlen * kHeads * kHeadDim);
  Strides const rows_outside{kSeqlen * kHeads * kHeadDim, kHeads * kHeadDim, kHeadDim};
  Strides const heads_outside{kSeqlen * kHeads * kHeadDim, kHeadDim, kSeqlen * kHeadDim};
  int const* element = tensor.data();
  for (int batch = 0; batch < kBatch; ++batch) {
    for (int row = 0; row < kSeqlen; ++row) {
      for (int head = 0; head < kHeads; ++head, element += kHeadDim) {
        check_equal(row_pointer(tensor.data(), rows_outside, batch, head, row) - element, 0L,
                    "row of a contiguous tensor");
      }
    }
  }
  element = tensor.data();
  for (int batch = 0; batch < kBatch; ++batch) {
    for (int head = 0; head < kHeads; ++head) {
      for (int row = 0; row < kSeqlen; ++row, element += kHeadDim) {
        check_equal(row_pointer(tensor.data(), heads_outside, batch, head, row) - element, 0L,
                    "row of a tensor with heads outside of rows");
      }
    }
  }
}

// Checks offsets beyond 2^31 elements. The pointers are only computed, never read.
void check_large_offsets() {
  Strides const stride{int64_t(1) << 40, int64_t(1) << 31, 3};
  auto const offset = [&](int32_t batch, int32_t head, int64_t row) {
    char* const none = nullptr;
    return reinterpret_cast<intptr_t>(row_pointer(none, stride, batch, head, row));
  };
  check_equal(offset(5, 0, 0), intptr_t(5) << 40, "batch");
  check_equal(offset(0, 7, 0), intptr_t(21), "head");
  check_equal(offset(0, 0, (int64_t(1) << 31) + 1), (intptr_t(1) << 62) + (intptr_t(1) << 31),
              "row");
}

struct Params {
  int32_t const* cu_seqlens_q;
  int32_t heads;
  int32_t seqlen_q;
  int64_t total_q;
};

// Checks the index of every number of an LSE [batch, heads, seqlen_q].
void check_dense_lse() {
  constexpr int kSeqlen = 7;
  Params const params{nullptr, kHeads, kSeqlen, 0};
  Sequence const sequence = make_sequence(kSeqlen, kSeqlen, 0, 0, kUnbounded, kUnbounded);
  int64_t number = 0;
  for (int batch = 0; batch < kBatch; ++batch) {
    for (int head = 0; head < kHeads; ++head) {
      for (int query = 0; query < kSeqlen; ++query, ++number) {
        check_equal(lse_index(params, sequence, batch, head, query), number, "LSE of a batch");
      }
    }
  }
}

// Checks the index of every number of a packed LSE [heads, total_q], whose sequences have 2, 0 and
// 5 queries.
void check_packed_lse() {
  int32_t const cu_seqlens[] = {0, 2, 2, 7};
  Params const params{cu_seqlens, kHeads, 5, 7};
  int64_t number = 0;
  for (int head = 0; head < kHeads; ++head) {
    for (int batch = 0; batch < kBatch; ++batch) {
      int const queries = cu_seqlens[batch + 1] - cu_seqlens[batch];
      Sequence const sequence =
          make_sequence(queries, queries, cu_seqlens[batch], 0, kUnbounded, kUnbounded);
      for (int query = 0; query < queries; ++query, ++number) {
        check_equal(lse_index(params, sequence, batch, head, query), number, "packed LSE");
      }
    }
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::check_dense_rows();
  cute_attention::check_large_offsets();
  cute_attention::check_dense_lse();
  cute_attention::check_packed_lse();
  return cute_attention::testing::report();
}
