// c_api.h: attention from C++ without Python: find_package(cute_attention), link
// cute_attention::cute_attention, call with raw device pointers and a stream. Every function may be
// called from any thread.
#pragma once

#include <cstdint>

#include "cute_attention/config.h"
#include "cute_attention/params.h"

#define CUTE_ATTENTION_API __attribute__((visibility("default")))

namespace cute_attention {

// One call as dispatch sees it: sizes and options, no pointers. All members have four bytes,
// because dispatch hashes and compares the struct as bytes.
struct Problem {
  Direction direction;
  DType dtype;  // a value outside the enum is a dtype that no row reads
  int32_t batch;
  int32_t seqlen_q;  // the longest one where packed
  int32_t seqlen_k;  // the longest one where packed
  int32_t heads;
  int32_t heads_kv;
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t window_left;   // kUnbounded where there is none
  int32_t window_right;  // kUnbounded where there is none
  float softcap;         // 0 where there is none
  uint32_t features;     // bits of Feature; dispatch adds kSoftcap where there is a softcap
};

// Sizes of the workspaces of BackwardParams, in elements.
struct BackwardWorkspace {
  int64_t grad_q_sum;
  int64_t grad_q_turn;  // for a deterministic call
};

// Any family that serves the problem; otherwise a value of Arch.
constexpr int32_t kAnyArch = 0;

// No device: explains what the rows say of the problem alone.
constexpr int32_t kNoDevice = -1;

}  // namespace cute_attention

extern "C" {

// Attention's forward pass on `device` and `stream` (a cudaStream_t), asynchronous. Pointers and
// strides must be multiples of 16 bytes. `arch` is kAnyArch or a value of Arch. Returns 0, or an
// error whose text cute_attention_last_error() gives: wrong arguments (which one, what was expected
// and what came), no kernel (with each row's reasons), or a failed launch.
//
// Batch and lengths may be 0: without queries nothing is done; without keys the output becomes 0,
// the LSE -infinity, and in a backward pass the gradients that there are become 0. A tensor without
// elements may be null.
CUTE_ATTENTION_API int32_t cute_attention_forward(cute_attention::ForwardParams const* params,
                                                  cute_attention::DType dtype, int32_t arch,
                                                  int32_t device, void* stream);

// Attention's backward pass, as the forward one: gradients of q, k and v from grad_o and grad_lse.
// The caller allocates the workspaces: `delta` of twice the LSE's size, the others as
// cute_attention_backward_workspace says of the same params (it reads no pointer), dtype, arch and
// device.
CUTE_ATTENTION_API int32_t cute_attention_backward_workspace(
    cute_attention::BackwardParams const* params, cute_attention::DType dtype, int32_t arch,
    int32_t device, cute_attention::BackwardWorkspace* workspace);
CUTE_ATTENTION_API int32_t cute_attention_backward(cute_attention::BackwardParams const* params,
                                                   cute_attention::DType dtype, int32_t arch,
                                                   int32_t device, void* stream);

// The text of this thread's last error; valid until the next one.
CUTE_ATTENTION_API char const* cute_attention_last_error();

// What is there and why, as JSON; valid until this thread's next call of one of these. The first of
// any call loads the kernel libraries; only devices and an explain with a device initialise CUDA.
// Null on error.
CUTE_ATTENTION_API char const* cute_attention_build_json();
CUTE_ATTENTION_API char const* cute_attention_libraries_json();
CUTE_ATTENTION_API char const* cute_attention_kernels_json();
CUTE_ATTENTION_API char const* cute_attention_devices_json();
CUTE_ATTENTION_API char const* cute_attention_explain_json(cute_attention::Problem const* problem,
                                                           int32_t device);

}  // extern "C"
