// torch_binding.cpp: the operators of cute_attention on the LibTorch stable ABI, once for every
// Python and every torch from 2.10 on. CUDA kernels alone: fakes, autograd and the CPU are
// Python's.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>
#include <string>
#include <tuple>

#include "cute_attention/c_api.h"

// Lives in libtorch_cuda: weak, so that this library also loads where torch has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace cute_attention {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kVectorElements = 8;  // 16 bytes of a 16-bit type, the unit of the kernels' loads

Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device) {
  int64_t strides[4];
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes.begin()[i], 1);
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                               aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

bool is_readable(Tensor const& tensor) {
  int64_t const last = tensor.dim() - 1;
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) return false;
  if (tensor.size(last) > 1 && tensor.stride(last) != 1) return false;
  for (int64_t i = 0; i < last; ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) % kVectorElements != 0) return false;
  }
  return true;
}

// The tensor itself, or a contiguous copy where the kernels cannot read its strides or its address.
Tensor readable(Tensor const& tensor, int32_t dtype, int32_t device) {
  if (is_readable(tensor)) return tensor;
  auto const sizes = tensor.sizes();
  Tensor copy = tensor.dim() == 4 ? empty({sizes[0], sizes[1], sizes[2], sizes[3]}, dtype, device)
                                  : empty({sizes[0], sizes[1], sizes[2]}, dtype, device);
  return torch::stable::copy_(copy, tensor);
}

Strides strides_of(Tensor const& tensor) {
  auto const strides = tensor.strides();
  auto const sizes = tensor.sizes();
  // The stride of a dimension of one element is never used, and may be anything.
  auto const used = [&](size_t i) { return sizes[i] > 1 ? strides[i] : 0; };
  return tensor.dim() == 4 ? Strides{used(0), used(1), used(2)} : Strides{0, used(0), used(1)};
}

int32_t to_int32(int64_t value, char const* name) {
  STD_TORCH_CHECK(value >= 0 && value <= std::numeric_limits<int32_t>::max(),
                  "cute_attention::forward: ", name, " is ", value, ", expected 0 to 2^31 - 1");
  return static_cast<int32_t>(value);
}

int32_t window_bound(int64_t bound) {
  return bound < 0 ? kUnbounded : static_cast<int32_t>(std::min<int64_t>(bound, kUnbounded));
}

int32_t const* cu_seqlens_of(std::optional<Tensor> const& cu_seqlens, char const* name) {
  if (!cu_seqlens) return nullptr;
  STD_TORCH_CHECK(
      cu_seqlens->is_cuda() && cu_seqlens->scalar_type() == ScalarType::Int &&
          cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 && cu_seqlens->is_contiguous(),
      "cute_attention::forward: ", name, " must be a contiguous int32 CUDA tensor [batch + 1]");
  return static_cast<int32_t const*>(cu_seqlens->data_ptr());
}

int32_t arch_of(std::string const& backend) {
  if (backend == "sm80") return static_cast<int32_t>(Arch::Sm80);
  if (backend == "sm90") return static_cast<int32_t>(Arch::Sm90);
  STD_TORCH_CHECK(false, "cute_attention::forward: backend is '", backend,
                  "', expected 'sm80' or 'sm90'");
  return kAnyArch;
}

void check(Tensor const& q, Tensor const& k, Tensor const& v, bool packed) {
  int64_t const dim = packed ? 3 : 4;
  STD_TORCH_CHECK(q.dim() == dim && k.dim() == dim && v.dim() == dim,
                  "cute_attention::forward: q, k and v must have ", dim, " dimensions");
  STD_TORCH_CHECK(q.is_cuda() && k.get_device_index() == q.get_device_index() && k.is_cuda() &&
                      v.is_cuda() && v.get_device_index() == q.get_device_index(),
                  "cute_attention::forward: q, k and v must be on one CUDA device");
  ScalarType const dtype = q.scalar_type();
  STD_TORCH_CHECK((dtype == ScalarType::Half || dtype == ScalarType::BFloat16) &&
                      k.scalar_type() == dtype && v.scalar_type() == dtype,
                  "cute_attention::forward: q, k and v must all be float16 or all bfloat16");
  bool const same_keys =
      k.size(0) == v.size(0) && (packed || (k.size(0) == q.size(0) && k.size(1) == v.size(1)));
  STD_TORCH_CHECK(
      same_keys && k.size(dim - 2) == v.size(dim - 2) && k.size(dim - 1) == q.size(dim - 1),
      "cute_attention::forward: the shapes of q, k and v do not match");
}

void* current_stream(int32_t device) {
  STD_TORCH_CHECK(&aoti_torch_get_current_cuda_stream != nullptr,
                  "cute_attention: this torch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

std::tuple<Tensor, Tensor> forward(Tensor const& q, Tensor const& k, Tensor const& v,
                                   std::optional<Tensor> const& cu_seqlens_q,
                                   std::optional<Tensor> const& cu_seqlens_k, int64_t max_seqlen_q,
                                   int64_t max_seqlen_k, double scale, double softcap,
                                   int64_t window_left, int64_t window_right,
                                   std::string const& backend) {
  bool const packed = cu_seqlens_q.has_value();
  STD_TORCH_CHECK(packed == cu_seqlens_k.has_value(),
                  "cute_attention::forward: cu_seqlens_q and cu_seqlens_k go together");
  check(q, k, v, packed);
  int32_t const device = q.get_device_index();
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
  int32_t const float32 = aoti_torch_dtype_float32();

  int64_t const dim = q.dim();
  ForwardParams params{};
  params.batch = to_int32(packed ? cu_seqlens_q->size(0) - 1 : q.size(0), "batch");
  params.seqlen_q = to_int32(packed ? max_seqlen_q : q.size(1), "seqlen_q");
  params.seqlen_k = to_int32(packed ? max_seqlen_k : k.size(1), "seqlen_k");
  params.total_q = packed ? q.size(0) : 0;
  params.total_k = packed ? k.size(0) : 0;
  params.heads = to_int32(q.size(dim - 2), "heads");
  params.heads_kv = to_int32(k.size(dim - 2), "heads_kv");
  params.head_dim = to_int32(q.size(dim - 1), "head_dim");
  params.head_dim_v = to_int32(v.size(dim - 1), "head_dim_v");

  Tensor out = packed
                   ? empty({q.size(0), params.heads, params.head_dim_v}, dtype, device)
                   : empty({q.size(0), q.size(1), params.heads, params.head_dim_v}, dtype, device);
  Tensor lse = packed ? empty({params.heads, q.size(0)}, float32, device)
                      : empty({params.batch, params.heads, params.seqlen_q}, float32, device);
  if (q.numel() == 0 || params.batch == 0) return {out, lse};
  bool const no_keys = params.seqlen_k == 0 || k.numel() == 0;
  if (packed || no_keys) {  // rows of no sequence, or of none with keys: no kernel writes them
    torch::stable::zero_(out);
    torch::stable::fill_(lse, -std::numeric_limits<double>::infinity());
  }
  if (no_keys) return {out, lse};

  Tensor const q_read = readable(q, dtype, device);
  Tensor const k_read = readable(k, dtype, device);
  Tensor const v_read = readable(v, dtype, device);
  params.q = q_read.data_ptr();
  params.k = k_read.data_ptr();
  params.v = v_read.data_ptr();
  params.o = out.data_ptr();
  params.lse = static_cast<float*>(lse.data_ptr());
  params.cu_seqlens_q = cu_seqlens_of(cu_seqlens_q, "cu_seqlens_q");
  params.cu_seqlens_k = cu_seqlens_of(cu_seqlens_k, "cu_seqlens_k");
  params.q_stride = strides_of(q_read);
  params.k_stride = strides_of(k_read);
  params.v_stride = strides_of(v_read);
  params.o_stride = strides_of(out);
  params.scale = static_cast<float>(scale);
  params.softcap = static_cast<float>(softcap);
  params.window_left = window_bound(window_left);
  params.window_right = window_bound(window_right);

  DType const kernel_dtype = q.scalar_type() == ScalarType::Half ? DType::Float16 : DType::BFloat16;
  int32_t const error = cute_attention_forward(&params, kernel_dtype, arch_of(backend), device,
                                               current_stream(device));
  STD_TORCH_CHECK(error == 0, cute_attention_last_error());
  return {out, lse};
}

}  // namespace
}  // namespace cute_attention

// SymInt, so that a graph compiled for dynamic shapes serves every length.
STABLE_TORCH_LIBRARY(cute_attention, library) {
  library.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
      "SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, float softcap, SymInt window_left, "
      "SymInt window_right, str backend) -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(cute_attention, CUDA, library) {
  library.impl("forward", TORCH_BOX(&cute_attention::forward));
}
