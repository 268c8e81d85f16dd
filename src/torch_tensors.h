// torch_tensors.h: torch's tensors on the LibTorch stable ABI, as the kernels take them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <optional>

#include "cute_attention/params.h"

namespace cute_attention {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

constexpr int64_t kVectorElements = 8;  // 16 bytes of a 16-bit type, the unit of the kernels' loads

inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device) {
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

// Whether the kernels can read its address and its strides.
inline bool is_readable(Tensor const& tensor) {
  auto const strides = tensor.strides();
  auto const sizes = tensor.sizes();
  size_t const last = sizes.size() - 1;
  if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) return false;
  if (sizes[last] > 1 && strides[last] != 1) return false;
  for (size_t i = 0; i < last; ++i) {
    if (sizes[i] > 1 && strides[i] % kVectorElements != 0) return false;
  }
  return true;
}

// torch::stable::contiguous looks its op up by name at each call, which takes a microsecond.
inline Tensor as_contiguous(Tensor const& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline Strides strides_of(Tensor const& tensor) {
  auto const strides = tensor.strides();
  auto const sizes = tensor.sizes();
  // The stride of a dimension of one element is never used, and may be anything.
  auto const used = [&](size_t i) { return sizes[i] > 1 ? strides[i] : 0; };
  return sizes.size() == 4 ? Strides{used(0), used(1), used(2)} : Strides{0, used(0), used(1)};
}

inline int32_t to_int32(int64_t value, char const* name) {
  STD_TORCH_CHECK(value >= 0 && value <= std::numeric_limits<int32_t>::max(),
                  "cute_attention: ", name, " is ", value, ", expected 0 to 2^31 - 1");
  return static_cast<int32_t>(value);
}

inline int32_t window_bound(int64_t bound) {
  return bound < 0 ? kUnbounded : static_cast<int32_t>(std::min<int64_t>(bound, kUnbounded));
}

inline int32_t const* cu_seqlens_of(OptionalTensor const& cu_seqlens, char const* name) {
  if (!cu_seqlens) return nullptr;
  STD_TORCH_CHECK(cu_seqlens->is_cuda() && cu_seqlens->scalar_type() == ScalarType::Int &&
                      cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1 &&
                      cu_seqlens->is_contiguous(),
                  "cute_attention: ", name, " must be a contiguous int32 CUDA tensor [batch + 1]");
  return static_cast<int32_t const*>(cu_seqlens->data_ptr());
}

// The sinks of q's heads, contiguous.
inline OptionalTensor contiguous_sinks(OptionalTensor const& sink, Tensor const& q) {
  if (!sink) return std::nullopt;
  STD_TORCH_CHECK(sink->is_cuda() && sink->get_device_index() == q.get_device_index() &&
                      sink->scalar_type() == ScalarType::Float && sink->dim() == 1 &&
                      q.dim() >= 2 && sink->size(0) == q.size(q.dim() - 2),
                  "cute_attention: sink must be float32 [heads] on q's device");
  return as_contiguous(*sink);
}

// The slopes of q's heads, [heads] or [batch, heads], of any strides.
inline AlibiSlopes slopes_of(OptionalTensor const& slopes, Tensor const& q, int64_t batch) {
  if (!slopes) return {};
  int64_t const dim = slopes->dim();
  STD_TORCH_CHECK(slopes->is_cuda() && slopes->get_device_index() == q.get_device_index() &&
                      slopes->scalar_type() == ScalarType::Float && (dim == 1 || dim == 2) &&
                      slopes->size(dim - 1) == q.size(q.dim() - 2) &&
                      (dim == 1 || slopes->size(0) == batch),
                  "cute_attention: alibi_slopes must be float32 [heads] or [batch, heads] on q's "
                  "device");
  return {static_cast<float const*>(slopes->data_ptr()), dim == 1 ? 0 : slopes->stride(0),
          slopes->stride(dim - 1)};
}

// The dtypes, devices and shapes of q, k and v fit together.
inline void check_inputs(Tensor const& q, Tensor const& k, Tensor const& v, bool packed) {
  int64_t const dim = packed ? 3 : 4;
  STD_TORCH_CHECK(q.dim() == dim && k.dim() == dim && v.dim() == dim,
                  "cute_attention: q, k and v must have ", dim, " dimensions");
  STD_TORCH_CHECK(q.is_cuda() && k.get_device_index() == q.get_device_index() && k.is_cuda() &&
                      v.is_cuda() && v.get_device_index() == q.get_device_index(),
                  "cute_attention: q, k and v must be on one CUDA device");
  ScalarType const dtype = q.scalar_type();
  STD_TORCH_CHECK((dtype == ScalarType::Half || dtype == ScalarType::BFloat16) &&
                      k.scalar_type() == dtype && v.scalar_type() == dtype,
                  "cute_attention: q, k and v must all be float16 or all bfloat16");
  bool const same_keys =
      k.size(0) == v.size(0) && (packed || (k.size(0) == q.size(0) && k.size(1) == v.size(1)));
  int64_t const heads = q.size(dim - 2), heads_kv = k.size(dim - 2);
  STD_TORCH_CHECK(heads_kv == 0 ? heads == 0 : heads % heads_kv == 0,
                  "cute_attention: the heads of k must divide those of q");
  STD_TORCH_CHECK(
      same_keys && k.size(dim - 2) == v.size(dim - 2) && k.size(dim - 1) == q.size(dim - 1),
      "cute_attention: the shapes of q, k and v do not match");
}

}  // namespace cute_attention
