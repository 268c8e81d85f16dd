// test_append.cpp: the C API passes calls that append to a cache on to a kernel library, and
// refuses wrong ones before anything is launched.
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cute_attention/c_api.h"
#include "fake_call.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

struct Answer {
  std::string error;
  int32_t used[8];
};

void* const kStream = reinterpret_cast<void*>(0x1234);

// Two sequences with three new tokens each, and one query each, turned.
Answer append(std::function<void(AppendParams&)> const& change, int32_t arch = kAnyArch) {
  Answer answer{"", {-1, -1, -1, -1, -1, -1, -1, -1}};
  void* const memory = const_cast<void*>(testing::device_memory());
  auto const* const numbers = static_cast<int32_t const*>(memory);
  AppendParams p{};
  p.k = p.v = p.q = p.k_cache = p.v_cache = p.turned_q = memory;
  p.k_stride = p.v_stride = {3 * 2 * 128, 2 * 128, 128};
  p.k_cache_stride = p.v_cache_stride = {96 * 2 * 128, 2 * 128, 128};
  p.q_stride = p.turned_q_stride = {4 * 128, 4 * 128, 128};
  p.batch = 2;
  p.seqlen_new = 3;
  p.seqlen_q = 1;
  p.heads = 4;
  p.heads_kv = 2;
  p.head_dim = p.head_dim_v = 128;
  p.cache.seqused_k = numbers;
  p.cache.pages_per_sequence = 1;
  p.cache.page_size = 96;
  p.cache.pages = 2;
  p.used = answer.used;
  p.rotary = {memory, memory, 64, 64, 100, 128, 0, 1, nullptr, 1};
  change(p);
  int32_t const error = cute_attention_append(&p, DType::BFloat16, arch, 1, kStream);
  if (error != 0) answer.error = cute_attention_last_error();
  return answer;
}

void test_what_the_library_gets() {
  for (int32_t const arch : {int32_t(kAnyArch), int32_t(Arch::Sm80), int32_t(Arch::Sm90)}) {
    Answer const answer = append([](AppendParams&) {}, arch);
    check_equal(answer.error, "", "an append");
    check_equal(answer.used[0], 3, "the new tokens");
    check_equal(answer.used[1], 1, "the device that is current");
    check_equal(answer.used[2], int32_t(DType::BFloat16), "the dtype");
    void* stream = nullptr;
    std::memcpy(&stream, answer.used + 4, sizeof(stream));
    check_equal(stream, kStream, "the stream");
  }
  Answer const nothing = append([](AppendParams& p) { p.batch = 0; });
  check_equal(nothing.error, "", "no sequence");
  check_equal(nothing.used[0], -1, "nothing is launched");
  check_equal(append([](AppendParams& p) { p.seqlen_new = 0, p.k = p.v = nullptr; }).error, "",
              "no new token");
  check_equal(append([](AppendParams& p) { p.rotary.cos = p.q = p.turned_q = nullptr; }).error, "",
              "nothing to turn");
  check_equal(append([](AppendParams& p) { p.head_dim = p.rotary.rotary_dim = 8; }).error,
              "append: fake failure (CUDA error 7)", "an error of the launch");
}

void test_refusals() {
  using Change = std::function<void(AppendParams&)>;
  auto* const misaligned = reinterpret_cast<int32_t*>(0x1002);
  std::vector<std::pair<char const*, Change>> const mistakes = {
      {"batch is -1, expected 0", [](AppendParams& p) { p.batch = -1; }},
      {"seqlen_new is -1, expected 0", [](AppendParams& p) { p.seqlen_new = -1; }},
      {"total_new is -1, expected 0", [](AppendParams& p) { p.total_new = -1; }},
      {"heads_kv is -1, expected 0", [](AppendParams& p) { p.heads_kv = -1; }},
      {"head_dim is 12, expected a multiple of 8", [](AppendParams& p) { p.head_dim = 12; }},
      {"head_dim_v is 0, expected a multiple of 8", [](AppendParams& p) { p.head_dim_v = 0; }},
      {"k is null, expected device memory", [](AppendParams& p) { p.k = nullptr; }},
      {"v_stride.row is 12, expected a multiple of 8",
       [](AppendParams& p) { p.v_stride.row = 12; }},
      {"k_cache_stride.row is 0, expected at least 128: what is written would overlap",
       [](AppendParams& p) { p.k_cache_stride.row = 0; }},
      {"turned_q is null, expected device memory", [](AppendParams& p) { p.turned_q = nullptr; }},
      {"used is null, expected device memory", [](AppendParams& p) { p.used = nullptr; }},
      {"cache.seqused_k is null", [](AppendParams& p) { p.cache.seqused_k = nullptr; }},
      {"cache.pages is 1, expected at least 2", [](AppendParams& p) { p.cache.pages = 1; }},
      {"cache.pages_per_sequence is 2, expected 1 to 1",
       [](AppendParams& p) { p.cache.pages_per_sequence = 2; }},
      {"rotary.rotary_dim is 136, expected 0 to 128",
       [](AppendParams& p) { p.rotary.rotary_dim = 136; }},
      {"rotary.rotary_dim is 9, expected an even",
       [](AppendParams& p) { p.rotary.rotary_dim = 9; }},
      {"rotary.positions is 0, expected 1", [](AppendParams& p) { p.rotary.positions = 0; }},
      {"rotary.sin is null", [](AppendParams& p) { p.rotary.sin = nullptr; }},
      {"rotary.seqlens is 0x1002", [=](AppendParams& p) { p.rotary.seqlens = misaligned; }},
      {"cu_seqlens_new is 0x1002", [=](AppendParams& p) { p.cu_seqlens_new = misaligned; }},
  };
  for (auto const& [message, change] : mistakes) {
    Answer const answer = append(change);
    check(answer.error.find(message) != std::string::npos, message + (": " + answer.error));
    check_equal(answer.used[0], -1, std::string("nothing is launched after: ") + message);
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_what_the_library_gets();
  cute_attention::test_refusals();
  return cute_attention::testing::report();
}
