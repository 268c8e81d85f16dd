// test_c_api.cpp: calls the C API on the fake kernel library, and checks what the core passes to a
// launch, and what it says if no row serves a call.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "check.h"
#include "fake_call.h"

namespace cute_attention {
namespace {

using testing::Answer;
using testing::backward;
using testing::BackwardCall;
using testing::check_equal;
using testing::forward;
using testing::ForwardCall;
using testing::kStream;
using testing::pack;
using testing::pack_backward;

int32_t current_device() {
  std::string const folder = std::getenv("CUTE_ATTENTION_KERNEL_PATH");
  void* const handle =
      dlopen((folder + "/libcute_attention_fake.so").c_str(), RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<int32_t (*)()>(dlsym(handle, "fake_current_device"))();
}

void test_launch() {
  for (int32_t const device : {1, 0, 1}) {  // the core remembers its answer for device 1
    Answer const answer = forward([&](ForwardCall& call) { call.device = device; });
    check_equal(answer.error, "", "error of a launch");
    check_equal(answer.written[0], 0.f, "the small row serves 64 queries");
    check_equal(answer.written[1], float(device), "the device that is current in a launch");
    check_equal(answer.written[2], float(device), "the device a launch is told of");
    void* stream = nullptr;
    std::memcpy(&stream, &answer.written[3], sizeof(stream));
    check_equal(stream, kStream, "the stream of a launch");
    check_equal(current_device(), 0, "the device that is current afterwards");
  }
  Answer const longer = forward([](ForwardCall& call) {
    call.params.seqlen_q = call.params.seqlen_k = 8192;
    call.params.heads = call.params.heads_kv = 16;
  });
  check_equal(longer.written[0], 1.f, "the large row serves 8192 queries");
}

ForwardWorkspace workspace_of(std::function<void(ForwardParams&)> const& change) {
  ForwardParams params{};
  testing::fill(params);
  change(params);
  ForwardWorkspace sizes{-1, -1};
  check_equal(cute_attention_forward_workspace(&params, DType::Float16, kAnyArch, 1, &sizes), 0,
              "error of a workspace");
  return sizes;
}

// The number of splits that a launch is told, and the workspace for them.
void test_splits() {
  auto const few_queries = [](ForwardParams& params) { params.seqlen_k = 65536; };
  ForwardWorkspace const chosen = workspace_of(few_queries);
  testing::check(chosen.num_splits > 1, "few queries and many keys are divided");
  check_equal(chosen.split_workspace, int64_t(chosen.num_splits) * 64 * 4 * (64 + 2),
              "the floats of their workspace");
  auto const splits_of = [&](bool with_workspace, int32_t num_splits) {
    return forward([&](ForwardCall& call) {
             few_queries(call.params);
             call.params.num_splits = num_splits;
             if (with_workspace) {
               call.params.split_workspace = static_cast<float*>(testing::device_memory());
             }
           })
        .written[6];
  };
  check_equal(splits_of(true, 0), float(chosen.num_splits), "the launch chooses the same number");
  check_equal(splits_of(true, chosen.num_splits), float(chosen.num_splits), "as asked");
  check_equal(splits_of(true, 5), 5.f, "another number, as asked");
  check_equal(splits_of(true, 1), 1.f, "one split, as asked");
  check_equal(splits_of(false, 5), 1.f, "no workspace, one split");
  setenv("CUTE_ATTENTION_SPLITS", "7", 1);
  check_equal(workspace_of(few_queries).num_splits, 7, "the environment");
  check_equal(splits_of(true, 0), 7.f, "the environment decides a launch");
  check_equal(splits_of(true, 3), 3.f, "the call decides before the environment");
  setenv("CUTE_ATTENTION_SPLITS", "many", 1);
  check_equal(forward([](ForwardCall& call) {
                call.params.split_workspace = static_cast<float*>(testing::device_memory());
              }).error,
              "CUTE_ATTENTION_SPLITS is 'many', expected 1 to 128", "a wrong variable");
  unsetenv("CUTE_ATTENTION_SPLITS");
  for (auto const& whole :
       {std::function<void(ForwardParams&)>([](ForwardParams& params) {
          params.seqlen_k = 65536;
          params.num_splits = 1;
        }),
        std::function<void(ForwardParams&)>([](ForwardParams&) {}),
        std::function<void(ForwardParams&)>([](ForwardParams& params) { params.seqlen_k = 0; }),
        std::function<void(ForwardParams&)>([](ForwardParams& params) {
          params.seqlen_q = 0;
          params.seqlen_k = 65536;
        })}) {
    ForwardWorkspace const none = workspace_of(whole);
    check_equal(none.split_workspace, 0, "no workspace");
    check_equal(none.num_splits, 1, "one split");
  }
  // The large row of the fake library does not divide keys.
  Answer const other = forward([&](ForwardCall& call) {
    call.arch = cute_attention_row("fake_sm80_d64_large");
    call.params.num_splits = 4;
    call.params.split_workspace = static_cast<float*>(testing::device_memory());
  });
  check_equal(other.written[6], 1.f, "a row that does not divide keys");
}

// A call that asks for a row gets that one, although another one would be chosen.
void test_launch_of_one_row() {
  int32_t const large = cute_attention_row("fake_sm80_d64_large");
  Answer const answer = forward([&](ForwardCall& call) { call.arch = large; });
  check_equal(answer.error, "", "error of a launch of one row");
  check_equal(answer.written[0], 1.f, "the row that was asked for");
  Answer const back = backward(
      [](BackwardCall& call) { call.arch = cute_attention_row("fake_sm80_bwd_d64_small"); });
  check_equal(back.written[0], 5.f, "the backward row that was asked for");
  Answer const refused = forward([&](ForwardCall& call) {
    call.arch = large;
    call.params.head_dim = 72;
  });
  check_equal(refused.error,
              "the kernel fake_sm80_d64_large does not serve forward, fp16, batch 1, seqlen 64 x "
              "64, heads 4 over 2, head_dim 72, head_dim_v 64, window (None, None), softcap "
              "0.000000, on fake GPU (compute capability 8.0)\n"
              "  fake_sm80_d64_large: head_dim 72 is above the row's 64",
              "a row that was asked for and does not serve");
  check_equal(cute_attention_row("sm80"), 0, "the number of no row");
  check_equal(std::string(cute_attention_last_error()), "no kernel called 'sm80' is loaded",
              "error of a name of no row");
  Answer const unknown = forward([](ForwardCall& call) { call.arch = kFirstRow + 100; });
  check_equal(unknown.error, "arch is 1100, expected 0 (any), 80, 90 or the number of a row",
              "a number of no row");
}

void test_backward_launch() {
  Answer const answer = backward([](BackwardCall&) {});
  check_equal(answer.error, "", "error of a backward launch");
  check_equal(answer.written[0], 6.f, "the row of a backward launch");
  check_equal(answer.written[5], 64.f, "seqlen_q of a backward launch");
}

// The row that serves the call says how large its workspaces must be.
void test_backward_workspace() {
  BackwardParams params{};
  testing::fill(params);
  BackwardWorkspace sizes{};
  auto const ask = [&] {
    return cute_attention_backward_workspace(&params, DType::Float16, kAnyArch, testing::kDevice,
                                             &sizes);
  };
  check_equal(ask(), 0, "status of a question for the workspace");
  check_equal(sizes.delta, 6, "the row that answers");
  check_equal(sizes.grad_q_sum, 64, "seqlen_q that the row is told of");
  check_equal(sizes.grad_kv_parts, testing::kDevice, "the device that the row is told of");
  pack(params);
  params.seqlen_q = 0;
  check_equal(ask(), 0, "status of a question for the workspace of packed sequences");
  check_equal(sizes.grad_q_turn, 64, "total_q that the row is told of");
  params.head_dim = 256;
  check_equal(ask(), 1, "status where no row serves");
}

void test_nothing_to_do() {
  std::function<void(ForwardCall&)> const empty[] = {
      [](ForwardCall& call) { call.params.batch = 0; },
      [](ForwardCall& call) { call.params.seqlen_q = 0; },
      [](ForwardCall& call) { call.params.heads = 0; },
      [](ForwardCall& call) { call.params.heads = call.params.heads_kv = 0; },
      [](ForwardCall& call) {
        pack(call.params);
        call.params.total_q = 0;
      },
      [](ForwardCall& call) {  // an empty problem needs no tensors
        call.params.batch = 0;
        call.params.q = call.params.k = call.params.v = call.params.o = nullptr;
      },
  };
  for (auto const& change : empty) {
    Answer const answer = forward(change);
    check_equal(answer.error, "", "error of an empty problem");
    check_equal(answer.written[0], -1.f, "nothing is launched for an empty problem");
  }
  Answer const answer =
      backward([](BackwardCall& call) { call.params.seqlen_q = call.params.seqlen_k = 0; });
  check_equal(answer.error, "", "error of an empty backward problem");
  check_equal(answer.written[0], -1.f, "nothing is launched for an empty backward problem");
}

// A call without keys is launched, since its output, or the gradient of q, must be written. A
// backward call without queries is launched, since the gradients of k and v must be written.
void test_one_side_is_empty() {
  Answer const keyless = forward([](ForwardCall& call) {
    call.params.seqlen_k = 0;
    call.params.k = call.params.v = nullptr;
  });
  check_equal(keyless.error, "", "error of a call without keys");
  check_equal(keyless.written[5], 64.f, "a call without keys is launched");
  Answer const keyless_backward = backward([](BackwardCall& call) {
    BackwardParams& params = call.params;
    params.seqlen_k = 0;
    params.k = params.v = params.grad_k = params.grad_v = nullptr;
  });
  check_equal(keyless_backward.error, "", "error of a backward call without keys");
  check_equal(keyless_backward.written[5], 64.f, "a backward call without keys is launched");
  Answer const queryless = backward([](BackwardCall& call) {
    BackwardParams& params = call.params;
    params.seqlen_q = 0;
    params.q = params.o = params.grad_o = params.grad_q = nullptr;
    params.lse = params.grad_q_sum = nullptr;
  });
  check_equal(queryless.error, "", "error of a backward call without queries");
  check_equal(queryless.written[5], 0.f, "a backward call without queries is launched");
}

// Packed rows after the last sequence are written even if all sequences are empty. So the core
// passes a seqlen_q of 1 to the launch, for which the grid is not empty.
void test_packed_rows_of_no_sequence() {
  Answer const ahead = forward([](ForwardCall& call) {
    pack(call.params);
    call.params.seqlen_q = 0;
  });
  check_equal(ahead.error, "", "error of packed rows of no sequence");
  check_equal(ahead.written[5], 1.f, "seqlen_q that a launch is told of");
  Answer const back = backward([](BackwardCall& call) {
    pack_backward(call.params);
    call.params.seqlen_q = call.params.seqlen_k = 0;
  });
  check_equal(back.error, "", "error of packed gradients of no sequence");
  check_equal(back.written[5], 1.f, "seqlen_q that a backward launch is told of");
}

// The longest length that the caller says is a bound, and may be any: a launch is told of no more
// than there are rows, but where the gradient of a bias has as many.
void test_packed_bounds() {
  for (int32_t const said : {1 << 20, kMaxSeqlen, INT32_MAX}) {
    Answer const ahead = forward([&](ForwardCall& call) {
      pack(call.params);
      call.params.seqlen_q = call.params.seqlen_k = said;
      call.params.total_q = 500;
    });
    check_equal(ahead.error, "", "error of a large bound");
    check_equal(ahead.written[5], 500.f, "seqlen_q of the launch");
    auto const pack_longer = [&](BackwardCall& call) {
      pack_backward(call.params);
      call.params.seqlen_q = call.params.seqlen_k = said;
      call.params.total_q = 500;
    };
    Answer const back = backward(pack_longer);
    check_equal(back.error, "", "error of a large bound of a backward");
    check_equal(back.written[5], 500.f, "seqlen_q of the backward launch");
  }
  Answer const shorter = forward([&](ForwardCall& call) {
    pack(call.params);
    call.params.seqlen_q = 3;
    call.params.total_q = 500;
  });
  check_equal(shorter.written[5], 3.f, "a bound that is less than all rows");
}

void test_miss() {
  Answer const answer = forward([](ForwardCall& call) {
    call.arch = int32_t(Arch::Sm80);
    call.params.head_dim = 256;
    call.params.window_right = 0;
  });
  std::string const expected =
      "no sm80 kernel serves forward, fp16, batch 1, seqlen 64 x 64, heads 4 over 2, head_dim 256, "
      "head_dim_v 64, window (None, 0), softcap 0.000000, on fake GPU (compute capability 8.0)\n"
      "  fake_sm80_d64_small: head_dim 256 is above the row's 64\n"
      "  fake_sm80_d64_large: head_dim 256 is above the row's 64\n"
      "  fake_sm80_d128: head_dim 256 is above the row's 128\n"
      "  fake_sm80_d128_softcap: head_dim 256 is above the row's 128; "
      "it serves only calls with softcap\n"
      "  fake_sm80_bwd_d64_small: it computes the backward pass; head_dim 256 is above the row's "
      "64\n"
      "  fake_sm80_bwd_d64: it computes the backward pass; head_dim 256 is above the row's 64";
  check_equal(answer.error, expected, "a miss");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_launch();
  cute_attention::test_splits();
  cute_attention::test_launch_of_one_row();
  cute_attention::test_backward_launch();
  cute_attention::test_backward_workspace();
  cute_attention::test_nothing_to_do();
  cute_attention::test_one_side_is_empty();
  cute_attention::test_packed_rows_of_no_sequence();
  cute_attention::test_miss();
  return cute_attention::testing::report();
}
