// fake_call.h: calls of the C API whose arguments are all right. A test changes one of them, mostly
// to make it wrong. The calls run on the fake kernel library, which reads no tensor.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cute_attention/c_api.h"

namespace cute_attention::testing {

constexpr int32_t kDevice = 1;
inline void* const kStream = reinterpret_cast<void*>(0x1234);

// An address that is aligned as the core demands. Nobody reads it.
inline void* device_memory() { return reinterpret_cast<void*>(0x10000); }

template <class Params>
struct Call {
  Params params{};
  DType dtype = DType::Float16;
  int32_t arch = kAnyArch;
  int32_t device = kDevice;
};
using ForwardCall = Call<ForwardParams>;
using BackwardCall = Call<BackwardParams>;

struct Answer {
  std::string error;
  std::vector<float> written;  // what the fake launch wrote; -1 if nothing was launched
};

// Fills in one sequence of 64 tokens, with 4 query heads and 2 KV heads of 64 elements; all tensors
// are contiguous.
template <class Params>
void fill(Params& params) {
  params.q = params.k = params.v = params.o = device_memory();
  params.q_stride = params.o_stride = {64 * 4 * 64, 4 * 64, 64};
  params.k_stride = params.v_stride = {64 * 2 * 64, 2 * 64, 64};
  params.batch = 1;
  params.seqlen_q = params.seqlen_k = 64;
  params.heads = 4;
  params.heads_kv = 2;
  params.head_dim = params.head_dim_v = 64;
  params.scale = 0.125f;
  params.window_left = params.window_right = kUnbounded;
}

// Makes packed sequences of it: three, with 64 tokens together.
template <class Params>
void pack(Params& params) {
  params.cu_seqlens_q = params.cu_seqlens_k = static_cast<int32_t const*>(device_memory());
  params.batch = 3;
  params.total_q = params.total_k = 64;
  params.q_stride.batch = params.k_stride.batch = params.v_stride.batch = params.o_stride.batch = 0;
}

// Makes a cache of k and v, of pages: two sequences of up to 4 pages of 16 tokens.
inline void put_into_pages(ForwardParams& params) {
  auto const* const numbers = static_cast<int32_t const*>(device_memory());
  params.batch = 2;
  params.cache.seqused_k = params.cache.block_table = numbers;
  params.cache.block_table_stride = params.cache.pages_per_sequence = 4;
  params.cache.page_size = 16;
  params.cache.pages = 5;
}
// The same without pages: a cache of three sequences.
inline void put_into_cache(ForwardParams& params) {
  put_into_pages(params);
  params.cache.block_table = nullptr;
  params.cache.pages_per_sequence = 1;
  params.cache.pages = 3;
}
inline void pack_backward(BackwardParams& params) {
  pack(params);
  params.grad_o_stride.batch = params.grad_q_stride.batch = params.grad_k_stride.batch =
      params.grad_v_stride.batch = 0;
}

// Calls the C API after `change` has changed the call that is right.
inline Answer forward(std::function<void(ForwardCall&)> const& change) {
  Answer answer{"", std::vector<float>(8, -1)};
  ForwardCall call;
  fill(call.params);
  call.params.lse = answer.written.data();
  change(call);
  if (cute_attention_forward(&call.params, call.dtype, call.arch, call.device, kStream) != 0) {
    answer.error = cute_attention_last_error();
  }
  return answer;
}

inline Answer backward(std::function<void(BackwardCall&)> const& change) {
  Answer answer{"", std::vector<float>(8, -1)};
  BackwardCall call;
  BackwardParams& params = call.params;
  fill(params);
  params.grad_o = params.grad_q = params.grad_k = params.grad_v = device_memory();
  params.grad_o_stride = params.grad_q_stride = params.q_stride;
  params.grad_k_stride = params.grad_v_stride = params.k_stride;
  params.lse = answer.written.data();
  params.delta = answer.written.data();
  params.grad_q_sum = static_cast<float*>(device_memory());
  change(call);
  if (cute_attention_backward(&params, call.dtype, call.arch, call.device, kStream) != 0) {
    answer.error = cute_attention_last_error();
  }
  return answer;
}

}  // namespace cute_attention::testing
