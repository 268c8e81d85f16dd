// test_cache_refusals.cpp: the C API refuses wrong calls with a cache before anything is launched.
// The text of each refusal names the argument, and says what was expected and what came.
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "fake_call.h"

namespace cute_attention {
namespace {

using testing::Answer;
using testing::check;
using testing::check_equal;
using testing::ForwardCall;

int32_t const* const kOffsets = static_cast<int32_t const*>(testing::device_memory());

struct Wrong {
  char const* message;
  std::function<void(ForwardCall&)> change;
};

template <class Change>
Wrong wrong_pages(char const* message, Change const& change) {
  return {message, [change](ForwardCall& call) {
            testing::put_into_pages(call.params);
            change(call.params);
          }};
}

// Without pages, and with keys that a kernel before appends.
template <class Change>
Wrong wrong_cache(char const* message, Change const& change) {
  return wrong_pages(message, [change](ForwardParams& params) {
    params.cache.block_table = nullptr;
    params.cache.pages_per_sequence = 1;
    params.cache.pages = params.batch;
    params.appended = {kOffsets, nullptr, 1, 0};
    change(params);
  });
}

std::vector<Wrong> mistakes() {
  using Params = ForwardParams;
  auto* const misaligned = reinterpret_cast<int32_t const*>(0x1002);
  return {
      wrong_pages("cache.seqused_k is null, expected it beside the other tensors of a cache",
                  [](Params& p) { p.cache.seqused_k = nullptr; }),
      wrong_pages("cu_seqlens_k is given, expected null: the lengths of a cache are",
                  [](Params& p) { p.cu_seqlens_k = kOffsets; }),
      wrong_pages("cache.pages is -1, expected 0", [](Params& p) { p.cache.pages = -1; }),
      wrong_pages("cache.page_size is 0, expected 1", [](Params& p) { p.cache.page_size = 0; }),
      wrong_pages("cache.page_size is 24, expected a multiple of 16",
                  [](Params& p) { p.cache.page_size = 24; }),
      wrong_pages("cache.pages_per_sequence is 67108849, expected 0 to 67108848",
                  [](Params& p) { p.cache.pages_per_sequence = kMaxSeqlen / 16 + 1; }),
      wrong_pages("cache.leftpad_k is given, expected null beside cache.block_table",
                  [](Params& p) { p.cache.leftpad_k = kOffsets; }),
      wrong_pages("cache.block_table_stride is -4, expected 0",
                  [](Params& p) { p.cache.block_table_stride = -4; }),
      wrong_pages("cache.seqused_k is 0x1002, expected a multiple of 4 bytes",
                  [=](Params& p) { p.cache.seqused_k = misaligned; }),
      wrong_pages("cache.block_table is 0x1002, expected a multiple of 4 bytes",
                  [=](Params& p) { p.cache.block_table = misaligned; }),
      wrong_pages("cache.batch_idx is 0x1002, expected a multiple of 4 bytes",
                  [=](Params& p) { p.cache.batch_idx = misaligned; }),
      wrong_cache("appended.seqused_k is given, expected null unless",
                  [](Params& p) { p.cache.seqused_k = nullptr; }),
      wrong_cache("appended.seqused_k is 0x1002, expected a multiple of 4 bytes",
                  [=](Params& p) { p.appended.seqused_k = misaligned; }),
      wrong_cache("appended.cu_seqlens is 0x1002, expected a multiple of 4 bytes",
                  [=](Params& p) { p.appended.cu_seqlens = misaligned; }),
      wrong_cache("appended.seqlen is -1, expected 0", [](Params& p) { p.appended.seqlen = -1; }),
      wrong_pages("k is null, expected device memory", [](Params& p) { p.k = nullptr; }),
      wrong_pages("k_stride.batch is 4611686018427387904, expected at most 2^39 / 5",
                  [](Params& p) { p.k_stride.batch = int64_t(1) << 62; }),
      wrong_pages("total_q is -1, expected 0",
                  [](Params& p) {
                    p.cu_seqlens_q = kOffsets;
                    p.total_q = -1;
                  }),
      wrong_pages("qv is 0x1002, expected a multiple of 16 bytes",
                  [=](Params& p) { p.qv = misaligned; }),
      wrong_pages("qv_stride.row is 4, expected a multiple of 8 elements",
                  [](Params& p) {
                    p.qv = p.q;
                    p.qv_stride = {0, 4, 0};
                  }),
      {"it does not serve qv",
       [](ForwardCall& call) {
         testing::put_into_pages(call.params);
         call.params.qv = call.params.q;
         call.params.qv_stride = call.params.q_stride;
       }},
      {"it does not serve a cache",
       [](ForwardCall& call) {
         call.arch = int32_t(Arch::Sm90);  // other rows do
         testing::put_into_cache(call.params);
       }},
      {"cache.pages_per_sequence is 2, expected 1 to 1",
       [](ForwardCall& call) {
         testing::put_into_cache(call.params);
         call.params.cache.pages_per_sequence = 2;
       }},
      {"cache.pages is 1, expected at least 2: one for each sequence of the batch",
       [](ForwardCall& call) {
         testing::put_into_cache(call.params);
         call.params.cache.pages = 1;
       }},
      {"cache.leftpad_k is 0x1002, expected a multiple of 4 bytes",
       [=](ForwardCall& call) {
         testing::put_into_cache(call.params);
         call.params.cache.leftpad_k = misaligned;
       }},
  };
}

void test_caches_that_are_refused() {
  for (Wrong const& wrong : mistakes()) {
    Answer const answer = testing::forward(wrong.change);
    check(answer.error.find(wrong.message) != std::string::npos,
          wrong.message + (": " + answer.error));
    check_equal(answer.written[0], -1.f, std::string("nothing is written after: ") + wrong.message);
  }
}

// Whoever asks for the workspace knows that no row serves the call, however many splits there are.
void test_no_row_is_known_before_anything_is_appended() {
  for (int32_t const num_splits : {0, 1, 3}) {
    ForwardParams params{};
    testing::fill(params);
    testing::put_into_cache(params);
    params.num_splits = num_splits;
    ForwardWorkspace sizes{};
    auto const ask = [&](Arch arch) {
      return cute_attention_forward_workspace(&params, DType::Float16, int32_t(arch),
                                              testing::kDevice, &sizes);
    };
    check_equal(ask(Arch::Sm80), 0, "a row serves the cache");
    check_equal(ask(Arch::Sm90), 1, "no row serves the cache");
    std::string const error = cute_attention_last_error();
    check(error.find("it does not serve a cache") != std::string::npos, error);
  }
}

// A cache may come with packed queries, with fewer pages than sequences where a table or batch_idx
// says which, and without room.
void test_caches_that_are_not_refused() {
  auto const error = [](std::function<void(ForwardParams&)> const& change) {
    return testing::forward([&](ForwardCall& call) { change(call.params); }).error;
  };
  check_equal(error(&testing::put_into_pages), "", "pages");
  check_equal(error(&testing::put_into_cache), "", "a cache");
  check_equal(error([](ForwardParams& p) {
                testing::put_into_pages(p);
                p.cu_seqlens_q = kOffsets;
                p.total_q = 64;
                p.q_stride.batch = p.o_stride.batch = 0;
                p.cache.pages = 1;
                p.total_k = -7;  // not read
              }),
              "", "packed queries");
  check_equal(error([](ForwardParams& p) {
                testing::put_into_cache(p);
                p.cache.batch_idx = p.cache.leftpad_k = kOffsets;
                p.cache.pages = 1;
              }),
              "", "two sequences with the same row");
  check_equal(error([](ForwardParams& p) {
                testing::put_into_cache(p);
                p.cache.page_size = 0;
                p.k = p.v = nullptr;
              }),
              "", "no room");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_caches_that_are_refused();
  cute_attention::test_no_row_is_known_before_anything_is_appended();
  cute_attention::test_caches_that_are_not_refused();
  return cute_attention::testing::report();
}
