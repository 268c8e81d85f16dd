// torch_binding.cpp: the CUDA implementation of the operators of cute_attention. It uses the
// LibTorch stable ABI, so that one build serves every Python and every torch from 2.10 on. Their
// schemas, fakes, autograd and CPU implementation are in the Python package.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>

#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "cute_attention/c_api.h"
#include "torch_append.h"
#include "torch_cache.h"
#include "torch_device.h"
#include "torch_inputs.h"
#include "torch_stack.h"
#include "torch_tensors.h"

namespace cute_attention {
namespace {

template <class Params>
void set_options(Params& params, Inputs const& in) {
  params.scale = static_cast<float>(in.options.scale);
  params.softcap = static_cast<float>(in.options.softcap);
  params.window_left = window_bound(in.options.window_left);
  params.window_right = window_bound(in.options.window_right);
  params.alibi_slopes = slopes_of(in.alibi_slopes, in.q, params.batch);
}

// Everything but pointers and strides.
template <class Params>
Params shape_params(Inputs const& in) {
  STD_TORCH_CHECK(in.packed() == in.cu_seqlens_k.has_value(),
                  "cute_attention: cu_seqlens_q and cu_seqlens_k go together");
  check_inputs(in.q, in.k, in.v, in.packed());
  STD_TORCH_CHECK(
      !in.packed() || (in.cu_seqlens_q->numel() == in.cu_seqlens_k->numel() &&
                       in.cu_seqlens_q->is_beside(in.q) && in.cu_seqlens_k->is_beside(in.q)),
      "cute_attention: cu_seqlens_q and cu_seqlens_k must have one length, on q's "
      "device");
  if (in.sink) check_sink(*in.sink, in.q);
  int64_t const dim = in.q.dim;
  int64_t const* const q = in.q.sizes;
  int64_t const* const k = in.k.sizes;
  Params params{};
  params.cu_seqlens_q = cu_seqlens_of(in.cu_seqlens_q, "cu_seqlens_q");
  params.cu_seqlens_k = cu_seqlens_of(in.cu_seqlens_k, "cu_seqlens_k");
  params.batch = to_int32(in.packed() ? in.cu_seqlens_q->sizes[0] - 1 : q[0], "batch");
  params.seqlen_q = to_int32(in.packed() ? in.max_seqlen_q : q[1], "seqlen_q");
  params.seqlen_k = to_int32(in.packed() ? in.max_seqlen_k : k[1], "seqlen_k");
  params.total_q = in.packed() ? q[0] : 0;
  params.total_k = in.packed() ? k[0] : 0;
  params.heads = to_int32(q[dim - 2], "heads");
  params.heads_kv = to_int32(k[dim - 2], "heads_kv");
  params.head_dim = to_int32(q[dim - 1], "head_dim");
  params.head_dim_v = to_int32(in.v.sizes[dim - 1], "head_dim_v");
  set_options(params, in);
  if (in.bias) {
    check_bias(*in.bias, in.q, {params.batch, params.heads, params.seqlen_q, params.seqlen_k});
  }
  params.dropout = dropout_of(in.dropout_p, in.dropout_seed, in.q);
  return params;
}

// The same for a call with a cache. What this lets pass attention_with_cache would too: it calls
// the op without a check of its own where a call of the kind has passed before.
ForwardParams cached_params(Inputs const& in) {
  check_cached_inputs(in.q, in.k, in.v, in.packed());
  STD_TORCH_CHECK(!in.packed() || in.cu_seqlens_q->is_beside(in.q),
                  "cute_attention: cu_seqlens_q must be on q's device");
  if (in.qv) check_qv(*in.qv, in.q, in.v);
  if (in.sink) check_sink(*in.sink, in.q);
  int64_t const dim = in.q.dim;
  ForwardParams params{};
  params.cu_seqlens_q = cu_seqlens_of(in.cu_seqlens_q, "cu_seqlens_q");
  params.batch = to_int32(in.packed() ? in.cu_seqlens_q->sizes[0] - 1 : in.q.sizes[0], "batch");
  params.seqlen_q = to_int32(in.packed() ? in.max_seqlen_q : in.q.sizes[1], "seqlen_q");
  params.total_q = in.packed() ? in.q.sizes[0] : 0;
  params.heads = to_int32(in.q.sizes[dim - 2], "heads");
  params.heads_kv = to_int32(in.k.sizes[2], "heads_kv");
  params.head_dim = to_int32(in.q.sizes[dim - 1], "head_dim");
  params.head_dim_v = to_int32(in.v.sizes[3], "head_dim_v");
  set_options(params, in);
  params.cache = cache_of(in.cache, in.k, in.q, params.batch);
  params.seqlen_k = longest_of(params.cache, to_int32(in.max_seqlen_k, "max_seqlen_k"));
  check_new_tokens(in.new_tokens, in.q, in.k, in.v, params.batch);
  params.num_splits = to_int32(in.num_splits, "num_splits");
  params.batch_invariant = in.batch_invariant;
  return params;
}

// The inputs' pointers and strides; `copies` keeps copies of those that the kernels cannot read.
template <class Params>
void set_inputs(Params& params, Inputs const& in, std::vector<Tensor>& copies) {
  TensorView const q = readable(in.q, copies), k = readable(in.k, copies),
                   v = readable(in.v, copies);
  params.q = q.data;
  params.k = k.data;
  params.v = v.data;
  params.q_stride = strides_of(q);
  params.k_stride = strides_of(k);
  params.v_stride = strides_of(v);
  if (in.bias) {
    int64_t const last = in.bias->strides[3];
    bool const reads = in.bias->sizes[3] == 1 || last == 0 || last == 1;
    params.bias = bias_of(reads ? *in.bias : contiguous(*in.bias, copies));
  }
  if (in.sink) params.sink = static_cast<float const*>(contiguous(*in.sink, copies).data);
  if constexpr (std::is_same_v<Params, ForwardParams>) {
    if (in.qv) {
      TensorView const qv = readable(*in.qv, copies);
      params.qv = qv.data;
      params.qv_stride = strides_of(qv);
    }
  }
}

// What a forward call writes beside its results. It lies in one tensor, since each allocation takes
// a microsecond, and lives until the stream is done with it. Null is what the call does not need.
struct ForwardMemory {
  Tensor tensor;
  int32_t* next_tile;  // of packed calls
  float* splits;       // of calls that divide their keys
  int32_t* used;       // of calls that append, like the next one
  void* turned_q;
};

// Sets the number of splits too. `params` is the call but for its outputs.
ForwardMemory forward_memory(Inputs const& in, ForwardParams& params, bool appends) {
  ForwardWorkspace splits{};
  if (in.q.numel() > 0) {
    int32_t const error = cute_attention_forward_workspace(&params, in.kernel_dtype(),
                                                           in.options.arch, in.device(), &splits);
    STD_TORCH_CHECK(error == 0, cute_attention_last_error());
    if (splits.split_workspace > 0) params.num_splits = splits.num_splits;
  }
  constexpr int64_t kAlignment = 128;
  int64_t bytes = 0;
  auto const place = [&](int64_t size) {
    int64_t const begin = bytes;
    bytes += (size + kAlignment - 1) / kAlignment * kAlignment;
    return size == 0 ? -1 : begin;
  };
  int64_t const next_tile = place(in.packed() ? 4 : 0);
  int64_t const split_parts = place(4 * splits.split_workspace);
  int64_t const used = place(appends ? 4 * int64_t{params.batch} : 0);
  int64_t const turned_q = place(appends && in.new_tokens.cos ? 2 * in.q.numel() : 0);
  if (bytes == 0) return {};
  Tensor tensor = empty({bytes}, aoti_torch_dtype_uint8(), in.device());
  auto* const begin = static_cast<char*>(data_of(tensor));
  auto const at = [&](int64_t offset) -> void* { return offset < 0 ? nullptr : begin + offset; };
  return {std::move(tensor), static_cast<int32_t*>(at(next_tile)),
          static_cast<float*>(at(split_parts)), static_cast<int32_t*>(at(used)), at(turned_q)};
}

// Writes new keys and values to the cache. `params` is then a call with the lengths that this
// leaves and, where there are angles, with the queries that it has turned.
void run_append(Inputs const& in, ForwardParams& params, ForwardMemory const& memory,
                std::vector<Tensor>& copies) {
  AppendParams append = append_params(params, in.new_tokens, in.q, in.k, in.v, copies);
  append.used = memory.used;
  append.turned_q = memory.turned_q;
  int32_t const error = cute_attention_append(&append, in.kernel_dtype(), in.options.arch,
                                              in.device(), current_stream(in.device()));
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
  params.cache.seqused_k = append.used;
  params.appended = appended_keys(append, in.new_tokens, in.k, in.v);
  if (append.rotary.cos != nullptr) {
    params.q = append.turned_q;
    params.q_stride = append.turned_q_stride;
  }
}

// Launches the forward pass into out and, where there is one, lse.
void run_forward(Inputs const& in, ForwardParams& params, Tensor const& out, Tensor const& lse) {
  std::vector<Tensor> copies;
  bool const appends = in.new_tokens.k.has_value() && params.batch > 0;
  if (in.q.numel() == 0 && !appends) return;
  if (params.batch == 0) {  // rows of no sequence
    fill_with_zeros(out);
    if (lse) {
      STABLE_TORCH_ERROR_CODE_CHECK(
          aoti_torch_aten_fill__Scalar(lse.get(), -std::numeric_limits<double>::infinity()));
    }
    return;
  }
  set_inputs(params, in, copies);
  ForwardMemory const memory = forward_memory(in, params, appends);
  if (appends) run_append(in, params, memory, copies);
  if (in.q.numel() == 0) return;
  TensorView const written(out);
  params.o = written.data;
  params.o_stride = strides_of(written);
  params.lse = lse ? static_cast<float*>(data_of(lse)) : nullptr;
  params.next_tile = memory.next_tile;
  params.split_workspace = memory.splits;
  int32_t const error = cute_attention_forward(&params, in.kernel_dtype(), in.options.arch,
                                               in.device(), current_stream(in.device()));
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
}

// An output without values: of q's shape, but with as many columns as v.
Tensor empty_output(Inputs const& in) {
  int64_t sizes[kMostDims];
  std::copy_n(in.q.sizes, in.q.dim, sizes);
  sizes[in.q.dim - 1] = in.v.sizes[in.v.dim - 1];
  return empty(sizes, in.q.dim, in.q.dtype, in.device());
}

Tensor empty_lse(Inputs const& in, ForwardParams const& params) {
  int32_t const dtype = aoti_torch_dtype_float32(), device = in.device();
  return in.packed() ? empty({params.heads, in.q.sizes[0]}, dtype, device)
                     : empty({params.batch, params.heads, params.seqlen_q}, dtype, device);
}

enum class Lse { Absent, Returned };

template <Form kForm, Lse kLse>
void forward(StableIValue* values, uint64_t /* arguments */, uint64_t /* results */) {
  Stack stack(values);
  Inputs const in = inputs_of<kForm>(stack);
  auto params = is_cached(kForm) ? cached_params(in) : shape_params<ForwardParams>(in);
  Tensor out = empty_output(in);
  Tensor lse = kLse == Lse::Returned ? empty_lse(in, params) : nullptr;
  run_forward(in, params, out, lse);
  if constexpr (kLse == Lse::Returned) {
    stack.put({&out, &lse});
  } else {
    stack.put({&out});
  }
}

// The number of 32-bit elements that has room for `count` and ends at a multiple of 128 bytes. Sums
// that begin elsewhere are right, but each addition of 128 bytes then touches five sectors of L2.
int64_t whole_lines(int64_t count) { return (count + 31) / 32 * 32; }

// Launches the backward pass. The workspaces lie in one tensor, since each allocation takes a
// microsecond; it lives until the stream is done with it.
void launch_backward(Inputs const& in, BackwardParams& params, bool deterministic) {
  int32_t const device = in.device(), arch = in.options.arch;
  BackwardWorkspace sizes{};
  int32_t error =
      cute_attention_backward_workspace(&params, in.kernel_dtype(), arch, device, &sizes);
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
  int64_t const sum = whole_lines(sizes.delta);  // where grad_q_sum begins
  int64_t const parts = sum + whole_lines(sizes.grad_q_sum);
  int64_t const bias_parts = parts + whole_lines(sizes.grad_kv_parts);
  int64_t const turn = bias_parts + whole_lines(sizes.grad_bias_parts);
  int64_t const end = turn + (deterministic ? sizes.grad_q_turn : 0);
  Tensor const workspaces = empty({end}, aoti_torch_dtype_float32(), device);
  auto* const begin = static_cast<float*>(data_of(workspaces));
  params.delta = begin;
  params.grad_q_sum = begin + sum;
  params.grad_kv_parts = sizes.grad_kv_parts > 0 ? begin + parts : nullptr;
  params.grad_bias_parts = sizes.grad_bias_parts > 0 ? begin + bias_parts : nullptr;
  params.grad_q_turn = deterministic ? reinterpret_cast<int32_t*>(begin + turn) : nullptr;
  error = cute_attention_backward(&params, in.kernel_dtype(), arch, device, current_stream(device));
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
}

// What the backward reads besides the inputs of the forward.
struct Results {
  TensorView grad_out;
  OptionalTensor grad_lse;
  TensorView out;
  TensorView lse;
  bool deterministic;
};

// Checks the output or its gradient: they have q's shape, but as many columns as v.
void check_output(Inputs const& in, TensorView const& tensor, char const* name) {
  int64_t const last = in.q.dim - 1;
  bool same = tensor.dim == in.q.dim && tensor.is_beside(in.q) && tensor.dtype == in.q.dtype &&
              tensor.sizes[last] == in.v.sizes[last];
  for (int64_t i = 0; same && i < last; ++i) same = tensor.sizes[i] == in.q.sizes[i];
  STD_TORCH_CHECK(same, "cute_attention::backward: ", name,
                  " must have q's dtype and device and the shape of the output");
}

// Checks the LSE or its gradient: they have a number for each query of each head.
void check_lse(Inputs const& in, TensorView const& tensor, char const* name) {
  int64_t rows = 1;
  for (int64_t i = 0; i < in.q.dim - 1; ++i) rows *= in.q.sizes[i];
  STD_TORCH_CHECK(tensor.is_beside(in.q) && tensor.dtype == aoti_torch_dtype_float32() &&
                      tensor.numel() == rows,
                  "cute_attention::backward: ", name, " must be float32 of the shape of the LSE");
}

void set_results(BackwardParams& params, Results const& given, std::vector<Tensor>& copies) {
  TensorView const out = readable(given.out, copies), grad_out = readable(given.grad_out, copies);
  params.o = out.data;
  params.grad_o = grad_out.data;
  params.o_stride = strides_of(out);
  params.grad_o_stride = strides_of(grad_out);
  params.lse = static_cast<float const*>(contiguous(given.lse, copies).data);
  if (given.grad_lse) {
    params.grad_lse = static_cast<float const*>(contiguous(*given.grad_lse, copies).data);
  }
}

void set_gradients(BackwardParams& params, Tensor const& dq, Tensor const& dk, Tensor const& dv) {
  TensorView const q(dq), k(dk), v(dv);
  params.grad_q = q.data;
  params.grad_k = k.data;
  params.grad_v = v.data;
  params.grad_q_stride = strides_of(q);
  params.grad_k_stride = strides_of(k);
  params.grad_v_stride = strides_of(v);
}

template <Form kForm>
void backward(StableIValue* values, uint64_t /* arguments */, uint64_t /* results */) {
  Stack stack(values);
  Results const given{stack.tensor(), stack.optional_tensor(), stack.tensor(), stack.tensor(),
                      stack.flag()};
  Inputs const in = inputs_of<kForm>(stack);
  auto params = shape_params<BackwardParams>(in);
  check_output(in, given.out, "out");
  check_output(in, given.grad_out, "grad_out");
  check_lse(in, given.lse, "lse");
  if (given.grad_lse) check_lse(in, *given.grad_lse, "grad_lse");

  Tensor dq = empty_like(in.q), dk = empty_like(in.k), dv = empty_like(in.v);
  Tensor dbias, dsink;  // an empty tensor stands for a gradient that is not wanted
  if constexpr (kForm == Form::Full) {
    bool const wants_bias = stack.flag() && in.bias;
    bool const wants_sink = stack.flag() && in.sink;
    dbias = wants_bias ? empty(in.bias->sizes, 4, in.bias->dtype, in.device())
                       : empty({0}, in.q.dtype, in.device());
    if (wants_bias) params.grad_bias = bias_of(TensorView(dbias));
    dsink = wants_sink ? empty({params.heads}, aoti_torch_dtype_float32(), in.device())
                       : empty({0}, in.q.dtype, in.device());
    if (wants_sink) params.grad_sink = static_cast<float*>(data_of(dsink));
  }
  if (in.q.numel() == 0 || params.batch == 0) {  // no query of a sequence: no kernel writes them
    for (Tensor const* gradient : {&dq, &dk, &dv, &dbias, &dsink}) {
      if (*gradient) fill_with_zeros(*gradient);
    }
  } else {
    std::vector<Tensor> copies;
    set_inputs(params, in, copies);
    set_results(params, given, copies);
    set_gradients(params, dq, dk, dv);
    launch_backward(in, params, given.deterministic);
  }
  if constexpr (kForm == Form::Full) {
    stack.put({&dq, &dk, &dv, &dbias, &dsink});
  } else {
    stack.put({&dq, &dk, &dv});
  }
}

}  // namespace
}  // namespace cute_attention

// The schemas are in python/cute_attention/ops/schema.py, which defines the ops when it is
// imported.
STABLE_TORCH_LIBRARY_IMPL(cute_attention, CUTE_ATTENTION_TORCH_DEVICE, library) {
  using cute_attention::Form;
  using cute_attention::Lse;
  library.impl("forward", &cute_attention::forward<Form::Full, Lse::Returned>);
  library.impl("forward.output", &cute_attention::forward<Form::Full, Lse::Absent>);
  library.impl("backward", &cute_attention::backward<Form::Full>);
  library.impl("brief_forward", &cute_attention::forward<Form::Brief, Lse::Returned>);
  library.impl("brief_forward.output", &cute_attention::forward<Form::Brief, Lse::Absent>);
  library.impl("brief_backward", &cute_attention::backward<Form::Brief>);
  library.impl("brief_packed_forward", &cute_attention::forward<Form::Packed, Lse::Returned>);
  library.impl("brief_packed_forward.output", &cute_attention::forward<Form::Packed, Lse::Absent>);
  library.impl("attend_cache", &cute_attention::forward<Form::Cached, Lse::Returned>);
  library.impl("attend_cache.output", &cute_attention::forward<Form::Cached, Lse::Absent>);
  library.impl("brief_attend_cache", &cute_attention::forward<Form::BriefCached, Lse::Returned>);
  library.impl("brief_attend_cache.output",
               &cute_attention::forward<Form::BriefCached, Lse::Absent>);
  library.impl("brief_packed_backward", &cute_attention::backward<Form::Packed>);
}
