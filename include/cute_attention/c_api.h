// c_api.h: attention from C++ without Python. A program finds the package by
// find_package(cute_attention), links cute_attention::cute_attention, and calls these functions
// with raw device pointers and a stream. Every function may be called from any thread.
#pragma once

#include <cstdint>

#include "cute_attention/append_params.h"
#include "cute_attention/config.h"
#include "cute_attention/params.h"

#define CUTE_ATTENTION_API __attribute__((visibility("default")))

namespace cute_attention {

// In place of the number of packed rows of q: sequences are not packed.
constexpr int32_t kNotPacked = -1;

// One call as dispatch sees it: sizes and options, no pointers.
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
  int32_t row;           // kAnyRow, or the number of the one row that may serve
  // The rest of what the number of splits of a forward call depends on, as in ForwardParams.
  int32_t total_q = kNotPacked;
  int32_t num_splits = 0;
  int32_t batch_invariant = 0;
};

// What the cost model reads of a forward row and of a GPU, neither of which needs to be there: so a
// row is judged before it is compiled, and for a GPU that another machine has.
struct CostQuestion {
  Arch arch;
  int32_t head_dim;  // of the row, not of a call
  int32_t head_dim_v;
  KernelConfig config;
  int32_t threads;              // of a CTA
  int32_t shared_memory_bytes;  // of a CTA, dynamic
  int32_t compute_capability;   // major * 10 + minor
  int32_t multiprocessors;
  int32_t shared_memory_per_multiprocessor;  // bytes
};

// In place of a value of Arch: any family of kernels that serves the problem.
constexpr int32_t kAnyArch = 0;

// In place of the number of a row: any that takes part in the choice. The numbers of rows begin at
// kFirstRow, so that none is a value of Arch.
constexpr int32_t kAnyRow = 0;
constexpr int32_t kFirstRow = 1000;

// In place of a device of cute_attention_explain_json: the tensors are not on a GPU. Every row then
// gives that as one of its reasons.
constexpr int32_t kNoDevice = -1;

}  // namespace cute_attention

extern "C" {

// What the forward pass may be given to be fast with few queries and many keys: a workspace of so
// many floats, and the number of splits of the keys that it is for (params.h). A caller who passes
// both gets the same row and splits; one who passes a null workspace gets the same result in
// one split. Of the pointers in params it reads only whether cu_seqlens_q, cu_seqlens_k, qv, sink,
// alibi_slopes.data, bias.data and dropout.seed are null. If num_splits is 0, the environment
// variable CUTE_ATTENTION_SPLITS may say it; else the number is the one that is expected to take
// the least time. Returns 0, or an error whose text cute_attention_last_error() gives: for a call
// with a cache also where no row serves it, so that one can know before something is appended.
CUTE_ATTENTION_API int32_t cute_attention_forward_workspace(
    cute_attention::ForwardParams const* params, cute_attention::DType dtype, int32_t arch,
    int32_t device, cute_attention::ForwardWorkspace* workspace);

// Attention's forward pass. It launches a kernel on `device` (CUDA's ordinal) and `stream` (a
// cudaStream_t of that device), and returns without waiting for it. `params` has the shapes and the
// units of its members (params.h). Tensors are of `dtype`, the LSE of float; addresses and strides
// must be multiples of 16 bytes. `arch` is the family of kernels to choose from: kAnyArch or a
// value of Arch; or it is the number of one row (cute_attention_row), which then serves the call or
// the call fails.
//
// Batch and lengths may be 0. Without queries the call does nothing. Without keys it sets the
// output to 0 and the LSE to the sink or -infinity; a backward call sets the gradients that have
// elements to 0. A tensor without elements may be null.
//
// Returns 0, or 1 on an error, whose text cute_attention_last_error() gives: an argument is wrong
// (which one, what was expected and what came), no row serves the call (with the reasons of the
// nearest rows), or the launch failed (with the row's name).
CUTE_ATTENTION_API int32_t cute_attention_forward(cute_attention::ForwardParams const* params,
                                                  cute_attention::DType dtype, int32_t arch,
                                                  int32_t device, void* stream);

// Appends new keys and values to a cache, and turns them and queries by rotary embeddings, as
// AppendParams says (append_params.h), with the same dtype, arch, device, stream and errors as the
// forward pass. A forward call behind it in the stream, of the caches and of turned_q, has `used`
// for its cache.seqused_k.
CUTE_ATTENTION_API int32_t cute_attention_append(cute_attention::AppendParams const* params,
                                                 cute_attention::DType dtype, int32_t arch,
                                                 int32_t device, void* stream);

// Attention's backward pass: computes the gradients of q, k and v from grad_o and grad_lse, with
// the same arguments and errors as the forward pass.
//
// The caller allocates the workspaces of BackwardParams, of the numbers of elements that
// cute_attention_backward_workspace writes for the same params, dtype, arch and device. That
// function checks the sizes and options in params. Of the pointers it reads only whether
// cu_seqlens_q, cu_seqlens_k, sink, alibi_slopes.data, bias.data and grad_bias.data are null, so
// that the others need not be set yet. A workspace of 0 elements may be null. grad_kv_parts and
// grad_bias_parts may always be null: if there are few keys or KV heads, or a small bias for many
// sequences, and so too little work for CTAs that each have a block of keys or of the bias, the
// call then takes longer. Returns 0, or an error whose text cute_attention_last_error() gives.
CUTE_ATTENTION_API int32_t cute_attention_backward_workspace(
    cute_attention::BackwardParams const* params, cute_attention::DType dtype, int32_t arch,
    int32_t device, cute_attention::BackwardWorkspace* workspace);
CUTE_ATTENTION_API int32_t cute_attention_backward(cute_attention::BackwardParams const* params,
                                                   cute_attention::DType dtype, int32_t arch,
                                                   int32_t device, void* stream);

// The text of this thread's last error; valid until the next one.
CUTE_ATTENTION_API char const* cute_attention_last_error();

// Adds a folder to those that are searched for kernel libraries: the folders of the environment
// variable CUTE_ATTENTION_KERNEL_PATH, the folder of this library, then those added, in order. It
// must be called before a function that loads the kernel libraries; a folder that was added already
// may be added again at any time. Returns 0, or 1 on an error.
CUTE_ATTENTION_API int32_t cute_attention_add_kernel_folder(char const* folder);

// Loads one kernel library at run time. Its rows take part in every choice from now on; if
// `on_request` is not 0, they serve only calls that ask for one of them by its number. A file that
// is loaded already is not loaded again. Returns 0, or 1 on an error: the library is not of this
// ABI and version, it has a row whose name is taken, or the file has changed since it was loaded.
CUTE_ATTENTION_API int32_t cute_attention_load_library(char const* path, int32_t on_request);

// The number of a loaded row, for `arch` of a call; 0 on an error: no row has this name.
CUTE_ATTENTION_API int32_t cute_attention_row(char const* name);

// Writes the microseconds that the cost model expects of such a row for a problem: figures to
// compare rows with, not predictions of a time. It loads nothing. Returns 0, or 1 on an error: a
// pointer is null, or a number of the question is not positive.
CUTE_ATTENTION_API int32_t cute_attention_estimate(cute_attention::Problem const* problem,
                                                   cute_attention::CostQuestion const* question,
                                                   double* microseconds);

// What there is, as JSON: how the core was built, the kernel libraries that were found, the rows
// that can be chosen, the GPUs, and what each row says to a problem. The text is valid until this
// thread calls one of these functions again. They return null on an error, whose text
// cute_attention_last_error() gives.
//
// The first call of any function but build_json and add_kernel_folder loads the kernel libraries.
// Only devices_json, and explain_json with a device, initialise CUDA.
CUTE_ATTENTION_API char const* cute_attention_build_json();
CUTE_ATTENTION_API char const* cute_attention_libraries_json();
CUTE_ATTENTION_API char const* cute_attention_kernels_json();
CUTE_ATTENTION_API char const* cute_attention_devices_json();
CUTE_ATTENTION_API char const* cute_attention_explain_json(cute_attention::Problem const* problem,
                                                           int32_t device);

}  // extern "C"
