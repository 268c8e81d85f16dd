// test_refusals.cpp: the C API refuses wrong calls before anything is launched. The text of each
// refusal names the argument, and says what was expected and what came.
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>

#include "check.h"
#include "fake_call.h"

namespace cute_attention {
namespace {

using testing::Answer;
using testing::BackwardCall;
using testing::check;
using testing::check_equal;
using testing::ForwardCall;
using testing::kDevice;
using testing::kStream;

void* const kMisaligned = reinterpret_cast<void*>(0x1008);
int32_t const* const kOffsets = static_cast<int32_t const*>(testing::device_memory());

template <class Call>
struct Wrong {
  char const* message;
  std::function<void(Call&)> change;
};

// The mistakes that the forward and the backward pass refuse with the same words.
template <class Call, class Params>
std::vector<Wrong<Call>> shared_mistakes(void (*pack)(Params&)) {
  return {
      {"batch is -1, expected 0 to 2147483647", [](Call& call) { call.params.batch = -1; }},
      {"seqlen_q is -1, expected 0 to 1073741568", [](Call& call) { call.params.seqlen_q = -1; }},
      {"seqlen_q is 1073741569, expected 0 to 1073741568",
       [](Call& call) { call.params.seqlen_q = kMaxSeqlen + 1; }},
      {"seqlen_k is 2147483647, expected 0 to 1073741568",
       [](Call& call) { call.params.seqlen_k = INT32_MAX; }},
      {"heads is -4, expected 0 to 2147483647", [](Call& call) { call.params.heads = -4; }},
      {"heads_kv is 0, expected 1 to 2147483647", [](Call& call) { call.params.heads_kv = 0; }},
      {"heads is 3, expected a multiple of heads_kv (2)",
       [](Call& call) { call.params.heads = 3; }},
      {"head_dim is 0, expected 1 to 2147483647", [](Call& call) { call.params.head_dim = 0; }},
      {"head_dim_v is -8, expected 1", [](Call& call) { call.params.head_dim_v = -8; }},
      {"head_dim 12 is not a multiple of 8", [](Call& call) { call.params.head_dim = 12; }},
      {"head_dim_v 12 is not a multiple of 8", [](Call& call) { call.params.head_dim_v = 12; }},
      {"window_left is -1, expected 0 to 2147483647",
       [](Call& call) { call.params.window_left = -1; }},
      {"window_right is -2147483648, expected 0",
       [](Call& call) { call.params.window_right = INT32_MIN; }},
      {"scale is nan, expected a finite number", [](Call& call) { call.params.scale = NAN; }},
      {"scale is inf, expected a finite number", [](Call& call) { call.params.scale = INFINITY; }},
      {"scale is 3e+38, expected a finite number of at most 2^127",
       [](Call& call) { call.params.scale = 3e38f; }},
      {"it does not serve a scale that is not positive",
       [](Call& call) { call.params.scale = -1; }},
      {"it does not serve a scale that is not positive, or below 2^-126",
       [](Call& call) { call.params.scale = 0x1.fp-127f; }},
      {"softcap is -1, expected 0 (none)", [](Call& call) { call.params.softcap = -1; }},
      {"softcap is nan, expected 0 (none)", [](Call& call) { call.params.softcap = NAN; }},
      {"softcap is inf, expected 0 (none)", [](Call& call) { call.params.softcap = INFINITY; }},
      {"softcap is 1e-39, too small for scale 0.125",
       [](Call& call) { call.params.softcap = 1e-39f; }},
      {"softcap is 1e+30, too large for scale 0.125",
       [](Call& call) { call.params.softcap = 1e30f; }},
      {"cu_seqlens_k is null, expected it beside cu_seqlens_q",
       [pack](Call& call) {
         pack(call.params);
         call.params.cu_seqlens_k = nullptr;
       }},
      {"cu_seqlens_q is null, expected it beside cu_seqlens_k",
       [](Call& call) { call.params.cu_seqlens_k = kOffsets; }},
      {"cu_seqlens_q is 0x1002, expected a multiple of 4 bytes",
       [pack](Call& call) {
         pack(call.params);
         call.params.cu_seqlens_q = reinterpret_cast<int32_t const*>(0x1002);
       }},
      {"total_q is -1, expected 0 to 2147483391",
       [pack](Call& call) {
         pack(call.params);
         call.params.total_q = -1;
       }},
      {"total_k is 2147483648, expected 0 to 2147483391",
       [pack](Call& call) {
         pack(call.params);
         call.params.total_k = int64_t(1) << 31;
       }},
      {"batch is 0, expected 1 or more where there are packed rows",
       [pack](Call& call) {
         pack(call.params);
         call.params.batch = 0;
       }},
      {"k_stride.batch is 8192, expected 0 where sequences are packed",
       [pack](Call& call) {
         pack(call.params);
         call.params.k_stride.batch = 64 * 2 * 64;
       }},
      {"q is null, expected device memory", [](Call& call) { call.params.q = nullptr; }},
      {"k is null, expected device memory", [](Call& call) { call.params.k = nullptr; }},
      {"v is null, expected device memory", [](Call& call) { call.params.v = nullptr; }},
      {"o is null, expected device memory", [](Call& call) { call.params.o = nullptr; }},
      {"q is 0x1008, expected a multiple of 16 bytes",
       [](Call& call) { call.params.q = kMisaligned; }},
      {"k_stride.row is 4, expected a multiple of 8 elements (16 bytes)",
       [](Call& call) { call.params.k_stride.row = 4; }},
      {"v_stride.head is -64, expected 0 or more",
       [](Call& call) { call.params.v_stride.head = -64; }},
      {"q_stride.row is 17179869184, expected at most 2^39 / 64",
       [](Call& call) { call.params.q_stride.row = int64_t(1) << 34; }},
      {"k_stride.batch is 4611686018427387904, expected at most 2^39 / 5",
       [](Call& call) {
         call.params.batch = 5;
         call.params.k_stride.batch = int64_t(1) << 62;
       }},
      {"arch is 120, expected 0 (any), 80, 90 or the number of a row",
       [](Call& call) { call.arch = 120; }},
      {"sink is 0x1002, expected a multiple of 4 bytes",
       [](Call& call) { call.params.sink = reinterpret_cast<float const*>(0x1002); }},
      {"alibi_slopes is 0x1002, expected a multiple of 4 bytes",
       [](Call& call) { call.params.alibi_slopes.data = reinterpret_cast<float const*>(0x1002); }},
      {"alibi_slopes.head_stride is -1, expected 0 to 549755813888",
       [](Call& call) {
         call.params.alibi_slopes = {static_cast<float const*>(testing::device_memory()), 0, -1};
       }},
      {"alibi_slopes.batch_stride is 1099511627776, expected 0 to 549755813888",
       [](Call& call) {
         call.params.alibi_slopes = {static_cast<float const*>(testing::device_memory()),
                                     int64_t(1) << 40, 1};
       }},
      {"bias is 0x1001, expected a multiple of 2 bytes",
       [](Call& call) { call.params.bias.data = reinterpret_cast<void*>(0x1001); }},
      {"bias is 0x1002, expected a multiple of 4 bytes",
       [](Call& call) {
         call.params.bias.data = reinterpret_cast<void*>(0x1002);
         call.params.bias.is_float = 1;
       }},
      {"bias.is_float is 2, expected 0 to 1",
       [](Call& call) { call.params.bias = {testing::device_memory(), 0, 0, 0, 0, 2}; }},
      {"bias.batch_stride is -1, expected 0 to 549755813888",
       [](Call& call) { call.params.bias = {testing::device_memory(), -1, 0, 0, 0, 0}; }},
      {"bias.head_stride is 1099511627776, expected 0 to 549755813888",
       [](Call& call) {
         call.params.bias = {testing::device_memory(), 0, int64_t(1) << 40, 0, 0, 0};
       }},
      {"bias.row_stride is -8, expected 0 to 549755813888",
       [](Call& call) { call.params.bias = {testing::device_memory(), 0, 0, -8, 1, 0}; }},
      {"bias.col_stride is 2, expected 0 to 1",
       [](Call& call) { call.params.bias = {testing::device_memory(), 0, 0, 8, 2, 0}; }},
      {"it does not serve bias",
       [](Call& call) { call.params.bias = {testing::device_memory(), 0, 0, 0, 0, 0}; }},
      {"dropout.drop_count is 257, expected 0 to 256",
       [](Call& call) {
         call.params.dropout = {static_cast<uint64_t const*>(testing::device_memory()), 257};
       }},
      {"dropout.drop_count is 1, expected 0 to 0",
       [](Call& call) { call.params.dropout.drop_count = 1; }},
      {"dropout.seed is 0x1004, expected a multiple of 8 bytes",
       [](Call& call) { call.params.dropout.seed = reinterpret_cast<uint64_t const*>(0x1004); }},
      {"it does not serve dropout",
       [](Call& call) {
         call.params.dropout = {static_cast<uint64_t const*>(testing::device_memory()), 26};
       }},
      {"it does not serve alibi_slopes",
       [](Call& call) {
         call.params.alibi_slopes = {static_cast<float const*>(testing::device_memory()), 0, 1};
       }},
      {"dtype is not the row's fp16", [](Call& call) { call.dtype = DType(7); }},
      {"device 2: the kernel libraries see 2 devices", [](Call& call) { call.device = 2; }},
      {"device -1: the kernel libraries see 2 devices", [](Call& call) { call.device = -1; }},
      {"batch 536870912 x heads 4 x seqlen_q 64 in tiles of 64 is above 2147418112 tiles",
       [pack](Call& call) {
         pack(call.params);
         call.params.batch = 1 << 29;
       }},
      {"fake failure (CUDA error 7)", [](Call& call) { call.params.head_dim = 8; }},
  };
}

template <class Call>
void check_refused(Wrong<Call> const& wrong, Answer const& answer) {
  check(answer.error.find(wrong.message) != std::string::npos,
        wrong.message + (": " + answer.error));
  check_equal(answer.written[0], -1.f, std::string("nothing is written after: ") + wrong.message);
}

void test_forward() {
  std::vector<Wrong<ForwardCall>> all = shared_mistakes<ForwardCall>(&testing::pack<ForwardParams>);
  std::vector<Wrong<ForwardCall>> const own = {
      {"o_stride.row is 0, expected at least 64: what is written would overlap",
       [](ForwardCall& call) { call.params.o_stride.row = 0; }},
      {"o_stride.head is 32, expected at least 64: what is written would overlap",
       [](ForwardCall& call) { call.params.o_stride.head = 32; }},
      {"lse is 0x1002, expected a multiple of 4 bytes",
       [](ForwardCall& call) { call.params.lse = reinterpret_cast<float*>(0x1002); }},
      {"it does not serve sink",
       [](ForwardCall& call) {
         call.arch = int32_t(Arch::Sm90);  // other rows do
         call.params.sink = static_cast<float const*>(testing::device_memory());
       }},
      {"next_tile is 0x1002, expected a multiple of 4 bytes",
       [](ForwardCall& call) { call.params.next_tile = reinterpret_cast<int32_t*>(0x1002); }},
      {"num_splits is -1, expected 0 to 128",
       [](ForwardCall& call) { call.params.num_splits = -1; }},
      {"num_splits is 129, expected 0 to 128",
       [](ForwardCall& call) { call.params.num_splits = 129; }},
      {"split_workspace is 0x1008, expected a multiple of 16 bytes",
       [](ForwardCall& call) { call.params.split_workspace = static_cast<float*>(kMisaligned); }},
  };
  all.insert(all.end(), own.begin(), own.end());
  for (auto const& wrong : all) check_refused(wrong, testing::forward(wrong.change));
}

void test_backward() {
  std::vector<Wrong<BackwardCall>> all = shared_mistakes<BackwardCall>(&testing::pack_backward);
  std::vector<Wrong<BackwardCall>> const own = {
      {"heads is 0, expected 1 or more", [](BackwardCall& call) { call.params.heads = 0; }},
      {"grad_o is null", [](BackwardCall& call) { call.params.grad_o = nullptr; }},
      {"grad_q is null", [](BackwardCall& call) { call.params.grad_q = nullptr; }},
      {"grad_k is null", [](BackwardCall& call) { call.params.grad_k = nullptr; }},
      {"grad_v is 0x1008", [](BackwardCall& call) { call.params.grad_v = kMisaligned; }},
      {"grad_k_stride.row is 0, expected at least 64",
       [](BackwardCall& call) { call.params.grad_k_stride.row = 0; }},
      {"grad_q_stride.batch is 128, expected 0 where sequences are packed",
       [](BackwardCall& call) {
         testing::pack_backward(call.params);
         call.params.grad_q_stride.batch = 128;
       }},
      {"lse is null", [](BackwardCall& call) { call.params.lse = nullptr; }},
      {"delta is null", [](BackwardCall& call) { call.params.delta = nullptr; }},
      {"grad_q_sum is null", [](BackwardCall& call) { call.params.grad_q_sum = nullptr; }},
      {"delta is 0x1008, expected a multiple of 16 bytes",
       [](BackwardCall& call) { call.params.delta = static_cast<float*>(kMisaligned); }},
      {"grad_q_sum is 0x1008, expected a multiple of 16 bytes",
       [](BackwardCall& call) { call.params.grad_q_sum = static_cast<float*>(kMisaligned); }},
      {"grad_kv_parts is 0x1008, expected a multiple of 16 bytes",
       [](BackwardCall& call) { call.params.grad_kv_parts = static_cast<float*>(kMisaligned); }},
      {"grad_bias_parts is 0x1008, expected a multiple of 16 bytes",
       [](BackwardCall& call) { call.params.grad_bias_parts = static_cast<float*>(kMisaligned); }},
      {"it does not serve sink",
       [](BackwardCall& call) {
         call.params.sink = static_cast<float const*>(testing::device_memory());
       }},
      {"sink is null, expected it where grad_sink is not",
       [](BackwardCall& call) {
         call.params.grad_sink = static_cast<float*>(testing::device_memory());
       }},
      {"bias is null, expected it where grad_bias is not",
       [](BackwardCall& call) { call.params.grad_bias.data = testing::device_memory(); }},
      {"grad_bias.is_float is 1, expected 0 as in bias",
       [](BackwardCall& call) {
         call.params.bias = {testing::device_memory(), 0, 0, 0, 0, 0};
         call.params.grad_bias = {testing::device_memory(), 0, 0, 0, 0, 1};
       }},
      {"grad_bias.col_stride is -1, expected 0 to 1",
       [](BackwardCall& call) {
         call.params.grad_bias = {testing::device_memory(), 0, 0, 0, -1, 0};
       }},
      {"grad_sink is 0x1002, expected a multiple of 4 bytes",
       [](BackwardCall& call) { call.params.grad_sink = reinterpret_cast<float*>(0x1002); }},
      {"batch 33554432 x heads 2 x seqlen_k 1048576 in tiles of 128 is above 2147418112 tiles",
       [](BackwardCall& call) {
         testing::pack_backward(call.params);
         call.params.batch = 1 << 25;
         call.params.seqlen_k = call.params.total_k = 1 << 20;
       }},
  };
  all.insert(all.end(), own.begin(), own.end());
  for (auto const& wrong : all) check_refused(wrong, testing::backward(wrong.change));
}

// Strides of a dimension with one element are never used, so they may be any multiple of 8.
// Elements of an input may share an address.
void test_what_is_not_refused() {
  Answer const unused = testing::forward([](ForwardCall& call) {
    call.params.q_stride.batch = call.params.o_stride.batch = -8;
    call.params.k_stride.batch = int64_t(1) << 62;
  });
  check_equal(unused.error, "", "strides of a batch of one");
  Answer const expanded = testing::forward(
      [](ForwardCall& call) { call.params.k_stride.head = call.params.v_stride.head = 0; });
  check_equal(expanded.error, "", "heads of k that are one");
  Answer const longest = testing::forward(
      [](ForwardCall& call) { call.params.seqlen_q = call.params.seqlen_k = kMaxSeqlen; });
  check_equal(longest.error, "", "the longest sequence");
  check_equal(longest.written[5], float(kMaxSeqlen), "the longest sequence is launched");
}

void test_null_arguments() {
  check_equal(cute_attention_forward(nullptr, DType::Float16, kAnyArch, kDevice, kStream), 1,
              "forward of nothing");
  check_equal(cute_attention_last_error(), std::string("params is null"), "params of forward");
  check_equal(cute_attention_backward(nullptr, DType::Float16, kAnyArch, kDevice, kStream), 1,
              "backward of nothing");
  check_equal(cute_attention_last_error(), std::string("params is null"), "params of backward");
  check_equal(cute_attention_forward_workspace(nullptr, DType::Float16, kAnyArch, kDevice, nullptr),
              1, "workspace of nothing");
  check_equal(cute_attention_last_error(), std::string("params is null"), "params of workspace");
  ForwardParams few{};
  testing::fill(few);
  check_equal(cute_attention_forward_workspace(&few, DType::Float16, kAnyArch, kDevice, nullptr), 1,
              "forward workspace into nothing");
  check_equal(cute_attention_last_error(), std::string("workspace is null"), "forward workspace");
  BackwardParams params{};
  testing::fill(params);
  check_equal(
      cute_attention_backward_workspace(&params, DType::Float16, kAnyArch, kDevice, nullptr), 1,
      "workspace into nothing");
  check_equal(cute_attention_last_error(), std::string("workspace is null"), "workspace");
  check(cute_attention_explain_json(nullptr, kDevice) == nullptr, "explain of nothing");
  check_equal(cute_attention_last_error(), std::string("problem is null"), "problem");
}

// explain does not refuse a problem. It says of each row why the row does not serve the problem.
void test_explain() {
  Problem problem{Direction::Forward,
                  DType::Float16,
                  1,
                  kMaxSeqlen + 1,
                  64,
                  4,
                  4,
                  64,
                  64,
                  kUnbounded,
                  kUnbounded,
                  0,
                  0};
  std::string const longer = cute_attention_explain_json(&problem, kDevice);
  check(longer.find("seqlen_q 1073741569 is above 1073741568") != std::string::npos, longer);
  problem.seqlen_q = 64;
  problem.seqlen_k = INT32_MAX;
  std::string const keys = cute_attention_explain_json(&problem, kDevice);
  check(keys.find("seqlen_k 2147483647 is above 1073741568") != std::string::npos, keys);
  problem.seqlen_q = problem.seqlen_k = kMaxSeqlen;
  problem.batch = problem.heads = problem.heads_kv = INT32_MAX;  // a product of 93 bits
  std::string const many = cute_attention_explain_json(&problem, kDevice);
  check(many.find("batch 2147483647 x heads 2147483647 x seqlen_q 1073741568 in tiles of 128 is "
                  "above 2147418112 tiles") != std::string::npos,
        many);
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_forward();
  cute_attention::test_backward();
  cute_attention::test_what_is_not_refused();
  cute_attention::test_null_arguments();
  cute_attention::test_explain();
  return cute_attention::testing::report();
}
