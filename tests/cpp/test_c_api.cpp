// test_c_api.cpp: cute_attention_forward on the fake kernel library: what a launch is given, what
// is refused before it, and what each refusal says.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "check.h"
#include "cute_attention/c_api.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr int32_t kDevice = 1;
void* const kStream = reinterpret_cast<void*>(0x1234);
void* const kMisaligned = reinterpret_cast<void*>(0x1008);

struct Call {
  ForwardParams params{};
  DType dtype = DType::Float16;
  int32_t arch = kAnyArch;
  int32_t device = kDevice;
};

struct Answer {
  std::string error;
  std::vector<float> written;  // where lse points; the fake launches write there
};

Answer forward(std::function<void(Call&)> const& change) {
  Call call;
  call.params.batch = 1;
  call.params.seqlen_q = call.params.seqlen_k = 64;
  call.params.heads = 4;
  call.params.heads_kv = 2;
  call.params.head_dim = call.params.head_dim_v = 64;
  call.params.scale = 0.125f;
  call.params.window_left = call.params.window_right = kUnbounded;
  change(call);
  Answer answer{"", std::vector<float>(8, -1)};
  call.params.lse = answer.written.data();
  if (cute_attention_forward(&call.params, call.dtype, call.arch, call.device, kStream) != 0) {
    answer.error = cute_attention_last_error();
  }
  return answer;
}

int32_t current_device() {
  std::string const folder = std::getenv("CUTE_ATTENTION_KERNEL_PATH");
  void* const handle =
      dlopen((folder + "/libcute_attention_fake.so").c_str(), RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<int32_t (*)()>(dlsym(handle, "fake_current_device"))();
}

void test_launch() {
  for (int32_t const device : {1, 0, 1}) {  // the second time the answer is remembered
    Answer const answer = forward([&](Call& call) { call.device = device; });
    check_equal(answer.error, "", "error of a launch");
    check_equal(answer.written[0], 0.f, "the small row serves 64 queries");
    check_equal(answer.written[1], float(device), "the device that is current in a launch");
    check_equal(answer.written[2], float(device), "the device a launch is told of");
    void* stream = nullptr;
    std::memcpy(&stream, &answer.written[3], sizeof(stream));
    check_equal(stream, kStream, "the stream of a launch");
    check_equal(current_device(), 0, "the device that is current afterwards");
  }
  Answer const longer = forward([](Call& call) {
    call.params.seqlen_q = call.params.seqlen_k = 8192;
    call.params.heads = call.params.heads_kv = 16;
  });
  check_equal(longer.written[0], 1.f, "the large row serves 8192 queries");
}

void test_nothing_to_do() {
  std::function<void(Call&)> const empty[] = {
      [](Call& call) { call.params.batch = 0; },
      [](Call& call) { call.params.seqlen_q = 0; },
      [](Call& call) { call.params.heads = 0; },
  };
  for (auto const& change : empty) {
    Answer const answer = forward(change);
    check_equal(answer.error, "", "error of an empty problem");
    check_equal(answer.written[0], -1.f, "nothing is launched for an empty problem");
  }
}

void test_errors() {
  struct {
    char const* message;
    std::function<void(Call&)> change;
  } const wrong[] = {
      {"heads must be a multiple of heads_kv", [](Call& call) { call.params.heads = 3; }},
      {"a size is negative", [](Call& call) { call.params.batch = -1; }},
      {"head_dim and head_dim_v must be positive", [](Call& call) { call.params.head_dim = 0; }},
      {"window_left and window_right must not be negative",
       [](Call& call) { call.params.window_left = -1; }},
      {"softcap must be finite and not negative", [](Call& call) { call.params.softcap = -1; }},
      {"must be multiples of 16 bytes", [](Call& call) { call.params.q = kMisaligned; }},
      {"must be multiples of 16 bytes", [](Call& call) { call.params.k_stride.row = 4; }},
      {"arch is 120, expected 0 (any), 80 or 90", [](Call& call) { call.arch = 120; }},
      {"device 2: the kernel libraries see 2 devices", [](Call& call) { call.device = 2; }},
      {"fake_sm80_d64_small: fake failure (CUDA error 7)",
       [](Call& call) { call.params.head_dim = 8; }},
  };
  for (auto const& [message, change] : wrong) {
    Answer const answer = forward(change);
    check(answer.error.find(message) != std::string::npos, message + (": " + answer.error));
    check_equal(answer.written[0], -1.f, std::string("nothing is written after: ") + message);
  }
}

void test_miss() {
  Answer const answer = forward([](Call& call) {
    call.arch = int32_t(Arch::Sm80);
    call.params.head_dim = 256;
    call.params.window_right = 0;
  });
  std::string const expected =
      "no sm80 kernel serves forward, fp16, batch 1, seqlen 64 x 64, heads 4 over 2, head_dim 256, "
      "head_dim_v 64, window (None, 0), softcap 0.000000, on fake GPU (compute capability 8.0)\n"
      "  fake_sm80_d64_small: head_dim 256 is above the row's 64\n"
      "  fake_sm80_d64_large: head_dim 256 is above the row's 64\n"
      "  fake_sm80_d128_causal: head_dim 256 is above the row's 128\n"
      "  fake_sm80_bwd_d64_small: it computes the backward pass; head_dim 256 is above the row's "
      "64\n"
      "  fake_sm80_bwd_d64: it computes the backward pass; head_dim 256 is above the row's 64\n"
      "  fake_sm80_d128_full_softcap: head_dim 256 is above the row's 128; "
      "some keys are masked, the row has no mask; softcap is not set, the row has one";
  check_equal(answer.error, expected, "a miss");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_launch();
  cute_attention::test_nothing_to_do();
  cute_attention::test_errors();
  cute_attention::test_miss();
  return cute_attention::testing::report();
}
