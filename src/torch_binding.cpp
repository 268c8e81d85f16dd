// torch_binding.cpp: the operators of cute_attention on the LibTorch stable ABI, once for every
// Python and every torch from 2.10 on. CUDA kernels alone: schemas, fakes, autograd and the CPU are
// Python's.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "cute_attention/c_api.h"
#include "torch_tensors.h"

// Lives in libtorch_cuda: weak, so that this library also loads where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace cute_attention {
namespace {

int32_t arch_of(std::string const& backend) {
  if (backend == "sm80") return static_cast<int32_t>(Arch::Sm80);
  if (backend == "sm90") return static_cast<int32_t>(Arch::Sm90);
  STD_TORCH_CHECK(false, "cute_attention: backend is '", backend, "', expected 'sm80' or 'sm90'");
  return kAnyArch;
}

void* current_stream(int32_t device) {
  STD_TORCH_CHECK(&aoti_torch_get_current_cuda_stream != nullptr,
                  "cute_attention: this torch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

// What forward and backward are both given: Arguments of python/cute_attention/arguments.py.
struct Inputs {
  Tensor const& q;
  Tensor const& k;
  Tensor const& v;
  std::string const& backend;
  double scale;
  int64_t window_left;
  int64_t window_right;
  double softcap;
  OptionalTensor const& cu_seqlens_q;
  OptionalTensor const& cu_seqlens_k;
  int64_t max_seqlen_q;
  int64_t max_seqlen_k;
  OptionalTensor const& alibi_slopes;
  OptionalTensor sink;  // contiguous

  bool packed() const { return cu_seqlens_q.has_value(); }
  int32_t device() const { return q.get_device_index(); }
  DType kernel_dtype() const {
    return q.scalar_type() == ScalarType::Half ? DType::Float16 : DType::BFloat16;
  }
  int32_t torch_dtype() const {
    int32_t dtype;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
    return dtype;
  }
  // The tensor itself, or a contiguous copy that the kernels can read.
  Tensor readable(Tensor const& tensor) const {
    if (is_readable(tensor)) return tensor;
    auto const n = tensor.sizes();
    Tensor copy = packed() ? empty({n[0], n[1], n[2]}, torch_dtype(), device())
                           : empty({n[0], n[1], n[2], n[3]}, torch_dtype(), device());
    return torch::stable::copy_(copy, tensor);
  }
};

// Everything but pointers and strides.
template <class Params>
Params shape_params(Inputs const& in) {
  STD_TORCH_CHECK(in.packed() == in.cu_seqlens_k.has_value(),
                  "cute_attention: cu_seqlens_q and cu_seqlens_k go together");
  check_inputs(in.q, in.k, in.v, in.packed());
  STD_TORCH_CHECK(
      !in.packed() || (in.cu_seqlens_q->numel() == in.cu_seqlens_k->numel() &&
                       in.cu_seqlens_q->get_device_index() == in.device() &&
                       in.cu_seqlens_k->get_device_index() == in.device()),
      "cute_attention: cu_seqlens_q and cu_seqlens_k must have one length, on q's device");
  int64_t const dim = in.q.dim();
  Params params{};
  params.batch = to_int32(in.packed() ? in.cu_seqlens_q->size(0) - 1 : in.q.size(0), "batch");
  params.seqlen_q = to_int32(in.packed() ? in.max_seqlen_q : in.q.size(1), "seqlen_q");
  params.seqlen_k = to_int32(in.packed() ? in.max_seqlen_k : in.k.size(1), "seqlen_k");
  params.total_q = in.packed() ? in.q.size(0) : 0;
  params.total_k = in.packed() ? in.k.size(0) : 0;
  params.heads = to_int32(in.q.size(dim - 2), "heads");
  params.heads_kv = to_int32(in.k.size(dim - 2), "heads_kv");
  params.head_dim = to_int32(in.q.size(dim - 1), "head_dim");
  params.head_dim_v = to_int32(in.v.size(dim - 1), "head_dim_v");
  params.cu_seqlens_q = cu_seqlens_of(in.cu_seqlens_q, "cu_seqlens_q");
  params.cu_seqlens_k = cu_seqlens_of(in.cu_seqlens_k, "cu_seqlens_k");
  params.scale = static_cast<float>(in.scale);
  params.softcap = static_cast<float>(in.softcap);
  params.window_left = window_bound(in.window_left);
  params.window_right = window_bound(in.window_right);
  params.sink = in.sink ? static_cast<float const*>(in.sink->data_ptr()) : nullptr;
  params.alibi_slopes = slopes_of(in.alibi_slopes, in.q, params.batch);
  return params;
}

template <class Params>
void set_inputs(Params& params, Tensor const& q, Tensor const& k, Tensor const& v) {
  params.q = q.data_ptr();
  params.k = k.data_ptr();
  params.v = v.data_ptr();
  params.q_stride = strides_of(q);
  params.k_stride = strides_of(k);
  params.v_stride = strides_of(v);
}

// Arguments that no kernel serves, and that dispatch has sent to another backend.
void check_absent(OptionalTensor const& bias, double dropout_p) {
  STD_TORCH_CHECK(!bias, "cute_attention: no kernel has a bias");
  STD_TORCH_CHECK(dropout_p == 0, "cute_attention: no kernel has dropout");
}

// Launches the forward pass into out and, where there is one, lse.
void run_forward(Inputs const& in, ForwardParams& params, Tensor out, OptionalTensor lse) {
  if (in.q.numel() == 0) return;
  if (params.batch == 0) {
    torch::stable::zero_(out);  // rows of no sequence
    if (lse) torch::stable::fill_(*lse, -std::numeric_limits<double>::infinity());
    return;
  }
  int32_t const device = in.device();
  Tensor const q_read = in.readable(in.q), k_read = in.readable(in.k), v_read = in.readable(in.v);
  set_inputs(params, q_read, k_read, v_read);
  params.o = out.data_ptr();
  params.o_stride = strides_of(out);
  params.lse = lse ? static_cast<float*>(lse->data_ptr()) : nullptr;
  OptionalTensor next_tile;  // a workspace of packed calls
  if (in.packed()) {
    next_tile = empty({1}, aoti_torch_dtype_int32(), device);
    params.next_tile = static_cast<int32_t*>(next_tile->data_ptr());
  }
  int32_t const error = cute_attention_forward(&params, in.kernel_dtype(), arch_of(in.backend),
                                               device, current_stream(device));
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
}

Tensor empty_output(Inputs const& in, ForwardParams const& params) {
  int32_t const dtype = in.torch_dtype(), device = in.device();
  int64_t const rows = in.q.size(0), heads = params.heads, cols = params.head_dim_v;
  return in.packed() ? empty({rows, heads, cols}, dtype, device)
                     : empty({rows, in.q.size(1), heads, cols}, dtype, device);
}

Tensor empty_lse(Inputs const& in, ForwardParams const& params) {
  int32_t const dtype = aoti_torch_dtype_float32(), device = in.device();
  return in.packed() ? empty({params.heads, in.q.size(0)}, dtype, device)
                     : empty({params.batch, params.heads, params.seqlen_q}, dtype, device);
}

enum class Lse { Absent, Returned };

template <Lse kLse>
auto forward(Tensor const& q, Tensor const& k, Tensor const& v, std::string const& backend,
             double scale, int64_t window_left, int64_t window_right, double softcap,
             OptionalTensor const& cu_seqlens_q, OptionalTensor const& cu_seqlens_k,
             int64_t max_seqlen_q, int64_t max_seqlen_k, OptionalTensor const& bias,
             OptionalTensor const& alibi_slopes, OptionalTensor const& sink, double dropout_p,
             OptionalTensor const& /* dropout_seed */) {
  check_absent(bias, dropout_p);
  Inputs const in{q,
                  k,
                  v,
                  backend,
                  scale,
                  window_left,
                  window_right,
                  softcap,
                  cu_seqlens_q,
                  cu_seqlens_k,
                  max_seqlen_q,
                  max_seqlen_k,
                  alibi_slopes,
                  contiguous_sinks(sink, q)};
  auto params = shape_params<ForwardParams>(in);
  Tensor out = empty_output(in, params);
  if constexpr (kLse == Lse::Absent) {
    run_forward(in, params, out, std::nullopt);
    return out;
  } else {
    Tensor lse = empty_lse(in, params);
    run_forward(in, params, out, lse);
    return std::tuple<Tensor, Tensor>(out, lse);
  }
}

// The number of 32-bit elements that has room for `count` and ends at a multiple of 16 bytes.
int64_t whole_vectors(int64_t count) { return (count + 3) / 4 * 4; }

// Launches the backward pass. The workspaces lie in one tensor, since each allocation takes a
// microsecond; it lives until the stream is done with it.
void launch_backward(Inputs const& in, BackwardParams& params, bool deterministic) {
  int32_t const device = in.device(), arch = arch_of(in.backend);
  BackwardWorkspace sizes{};
  int32_t error =
      cute_attention_backward_workspace(&params, in.kernel_dtype(), arch, device, &sizes);
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
  int64_t const sum = whole_vectors(sizes.delta);  // where grad_q_sum begins
  int64_t const parts = sum + whole_vectors(sizes.grad_q_sum);
  int64_t const turn = parts + whole_vectors(sizes.grad_kv_parts);
  int64_t const end = turn + (deterministic ? sizes.grad_q_turn : 0);
  Tensor workspaces = empty({end}, aoti_torch_dtype_float32(), device);
  auto* const begin = static_cast<float*>(workspaces.data_ptr());
  params.delta = begin;
  params.grad_q_sum = begin + sum;
  params.grad_kv_parts = sizes.grad_kv_parts > 0 ? begin + parts : nullptr;
  params.grad_q_turn = deterministic ? reinterpret_cast<int32_t*>(begin + turn) : nullptr;
  error = cute_attention_backward(&params, in.kernel_dtype(), arch, device, current_stream(device));
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
}

// The output or its gradient: like q, with the columns of v.
void check_output(Inputs const& in, Tensor const& tensor, char const* name) {
  int64_t const last = in.q.dim() - 1;
  bool same = tensor.dim() == in.q.dim() && tensor.is_cuda() &&
              tensor.get_device_index() == in.device() &&
              tensor.scalar_type() == in.q.scalar_type() && tensor.size(last) == in.v.size(last);
  for (int64_t i = 0; same && i < last; ++i) same = tensor.size(i) == in.q.size(i);
  STD_TORCH_CHECK(same, "cute_attention::backward: ", name,
                  " must have q's dtype and device and the shape of the output");
}

// The LSE or its gradient: a number for each row of q of each head.
void check_lse(Inputs const& in, Tensor const& tensor, char const* name) {
  int64_t rows = 1;
  for (int64_t i = 0; i < in.q.dim() - 1; ++i) rows *= in.q.size(i);
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == in.device() &&
                      tensor.scalar_type() == ScalarType::Float && tensor.numel() == rows,
                  "cute_attention::backward: ", name, " must be float32 of the shape of the LSE");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    Tensor const& grad_out, OptionalTensor const& grad_lse, Tensor const& out, Tensor const& lse,
    bool deterministic, Tensor const& q, Tensor const& k, Tensor const& v,
    std::string const& backend, double scale, int64_t window_left, int64_t window_right,
    double softcap, OptionalTensor const& cu_seqlens_q, OptionalTensor const& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, OptionalTensor const& bias,
    OptionalTensor const& alibi_slopes, OptionalTensor const& sink, double dropout_p,
    OptionalTensor const& /* dropout_seed */, bool /* needs_bias */, bool needs_sink) {
  check_absent(bias, dropout_p);
  Inputs const in{q,
                  k,
                  v,
                  backend,
                  scale,
                  window_left,
                  window_right,
                  softcap,
                  cu_seqlens_q,
                  cu_seqlens_k,
                  max_seqlen_q,
                  max_seqlen_k,
                  alibi_slopes,
                  contiguous_sinks(sink, q)};
  auto params = shape_params<BackwardParams>(in);
  check_output(in, out, "out");
  check_output(in, grad_out, "grad_out");
  check_lse(in, lse, "lse");
  if (grad_lse) check_lse(in, *grad_lse, "grad_lse");

  auto const contiguous_like = [&](Tensor const& t) {
    return in.packed()
               ? empty({t.size(0), t.size(1), t.size(2)}, in.torch_dtype(), in.device())
               : empty({t.size(0), t.size(1), t.size(2), t.size(3)}, in.torch_dtype(), in.device());
  };
  Tensor dq = contiguous_like(q), dk = contiguous_like(k), dv = contiguous_like(v);
  // An empty tensor stands for a gradient that is not wanted.
  Tensor dbias = empty({0}, in.torch_dtype(), in.device());
  bool const wants_sink = sink && needs_sink;
  Tensor dsink = wants_sink ? empty({params.heads}, aoti_torch_dtype_float32(), in.device())
                            : empty({0}, in.torch_dtype(), in.device());
  if (q.numel() == 0 || params.batch == 0) {  // no query of a sequence: no kernel writes them
    for (Tensor* gradient : {&dq, &dk, &dv, &dsink}) torch::stable::zero_(*gradient);
    return {dq, dk, dv, dbias, dsink};
  }

  Tensor const q_read = in.readable(q), k_read = in.readable(k), v_read = in.readable(v);
  Tensor const out_read = in.readable(out), grad_out_read = in.readable(grad_out);
  Tensor const lse_read = as_contiguous(lse);
  set_inputs(params, q_read, k_read, v_read);
  params.o = out_read.data_ptr();
  params.grad_o = grad_out_read.data_ptr();
  params.o_stride = strides_of(out_read);
  params.grad_o_stride = strides_of(grad_out_read);
  params.lse = static_cast<float const*>(lse_read.data_ptr());
  OptionalTensor grad_lse_read;
  if (grad_lse) {
    grad_lse_read = as_contiguous(*grad_lse);
    params.grad_lse = static_cast<float const*>(grad_lse_read->data_ptr());
  }
  params.grad_q = dq.data_ptr();
  params.grad_k = dk.data_ptr();
  params.grad_v = dv.data_ptr();
  params.grad_q_stride = strides_of(dq);
  params.grad_k_stride = strides_of(dk);
  params.grad_v_stride = strides_of(dv);
  params.grad_sink = wants_sink ? static_cast<float*>(dsink.data_ptr()) : nullptr;
  launch_backward(in, params, deterministic);
  return {dq, dk, dv, dbias, dsink};
}

}  // namespace
}  // namespace cute_attention

// The schemas are in python/cute_attention/ops/schema.py, which defines the ops when it is
// imported.
STABLE_TORCH_LIBRARY_IMPL(cute_attention, CUDA, library) {
  using cute_attention::Lse;
  library.impl("forward", TORCH_BOX(&cute_attention::forward<Lse::Returned>));
  library.impl("forward.output", TORCH_BOX(&cute_attention::forward<Lse::Absent>));
  library.impl("backward", TORCH_BOX(&cute_attention::backward));
}
