// torch_tensors.h: torch's tensors on the LibTorch stable ABI, as the kernels take them.
#pragma once

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "cute_attention/params.h"
#include "torch_device.h"

namespace cute_attention {

constexpr int64_t kVectorElements = 8;  // 16 bytes of a 16-bit type, the unit of the kernels' loads
constexpr int64_t kMostDims = 4;

struct DeleteTensor {
  void operator()(AtenTensorOpaque* tensor) const { aoti_torch_delete_tensor_object(tensor); }
};

// A tensor that this library holds a reference of.
using Tensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

// A tensor that somebody else holds, and what the kernels are told of it. It is read once: each
// question is a call into libtorch.
struct TensorView {
  explicit TensorView(AtenTensorHandle tensor) : handle(tensor) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor, &data));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    int32_t type = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &type));
    is_cuda = type == device_type();
    device = device_index(tensor);
  }
  explicit TensorView(Tensor const& tensor) : TensorView(tensor.get()) {}

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t i = 0; i < dim; ++i) count *= sizes[i];
    return count;
  }
  bool is_contiguous() const {
    int64_t stride = 1;
    for (int64_t i = dim; i-- > 0;) {
      if (sizes[i] == 0) return true;
      if (sizes[i] > 1 && strides[i] != stride) return numel() == 0;
      stride *= sizes[i];
    }
    return true;
  }
  bool is_beside(TensorView const& other) const { return is_cuda && device == other.device; }

  AtenTensorHandle handle;
  void* data;
  int64_t dim;
  int64_t* sizes;
  int64_t* strides;
  int32_t dtype;
  int32_t device;
  bool is_cuda;
};

using OptionalTensor = std::optional<TensorView>;

inline Tensor empty(int64_t const* sizes, int64_t dim, int32_t dtype, int32_t device) {
  int64_t strides[kMostDims];
  int64_t stride = 1;
  for (int64_t i = dim; i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, dtype, device_type(), device, &handle));
  return Tensor(handle);
}

inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype, int32_t device) {
  return empty(sizes.begin(), static_cast<int64_t>(sizes.size()), dtype, device);
}

inline Tensor empty_like(TensorView const& tensor) {  // contiguous
  return empty(tensor.sizes, tensor.dim, tensor.dtype, tensor.device);
}

inline void* data_of(Tensor const& tensor) {
  void* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
  return data;
}

inline void fill_with_zeros(Tensor const& tensor) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(tensor.get()));
}

// A contiguous copy, which `copies` keeps.
inline TensorView copied(TensorView const& tensor, std::vector<Tensor>& copies) {
  copies.push_back(empty_like(tensor));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(copies.back().get(), tensor.handle, 0));
  return TensorView(copies.back());
}

// The tensor itself, or a copy whose address and strides the kernels can read.
inline TensorView readable(TensorView const& tensor, std::vector<Tensor>& copies) {
  int64_t const last = tensor.dim - 1;
  bool good = reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 &&
              (tensor.sizes[last] <= 1 || tensor.strides[last] == 1);
  for (int64_t i = 0; i < last; ++i) {
    good = good && (tensor.sizes[i] <= 1 || tensor.strides[i] % kVectorElements == 0);
  }
  return good ? tensor : copied(tensor, copies);
}

inline TensorView contiguous(TensorView const& tensor, std::vector<Tensor>& copies) {
  return tensor.is_contiguous() ? tensor : copied(tensor, copies);
}

inline Strides strides_of(TensorView const& tensor) {
  // The stride of a dimension of one element is never used, and may be anything.
  auto const used = [&](int64_t i) { return tensor.sizes[i] > 1 ? tensor.strides[i] : 0; };
  return tensor.dim == 4 ? Strides{used(0), used(1), used(2)} : Strides{0, used(0), used(1)};
}

// Those of a contiguous tensor of the same shape.
inline Strides contiguous_strides(TensorView const& tensor) {
  int64_t const last = tensor.dim - 1, head = tensor.sizes[last],
                row = head * tensor.sizes[last - 1];
  return {tensor.dim == 4 ? row * tensor.sizes[1] : 0, row, head};
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
  STD_TORCH_CHECK(cu_seqlens->is_cuda && cu_seqlens->dtype == aoti_torch_dtype_int32() &&
                      cu_seqlens->dim == 1 && cu_seqlens->sizes[0] >= 1 &&
                      cu_seqlens->is_contiguous(),
                  "cute_attention: ", name, " must be a contiguous int32 CUDA tensor [batch + 1]");
  return static_cast<int32_t const*>(cu_seqlens->data);
}

inline void check_sink(TensorView const& sink, TensorView const& q) {
  STD_TORCH_CHECK(sink.is_beside(q) && sink.dtype == aoti_torch_dtype_float32() && sink.dim == 1 &&
                      q.dim >= 2 && sink.sizes[0] == q.sizes[q.dim - 2],
                  "cute_attention: sink must be float32 [heads] on q's device");
}

// The slopes of q's heads, [heads] or [batch, heads], of any strides.
inline AlibiSlopes slopes_of(OptionalTensor const& slopes, TensorView const& q, int64_t batch) {
  if (!slopes) return {};
  int64_t const dim = slopes->dim;
  STD_TORCH_CHECK(slopes->is_beside(q) && slopes->dtype == aoti_torch_dtype_float32() &&
                      (dim == 1 || dim == 2) && slopes->sizes[dim - 1] == q.sizes[q.dim - 2] &&
                      (dim == 1 || slopes->sizes[0] == batch),
                  "cute_attention: alibi_slopes must be float32 [heads] or [batch, heads] on q's "
                  "device");
  return {static_cast<float const*>(slopes->data), dim == 1 ? 0 : slopes->strides[0],
          slopes->strides[dim - 1]};
}

// Checks a bias: four dimensions, each of which has 1 or as many numbers as the scores have.
inline void check_bias(TensorView const& bias, TensorView const& q, int64_t const (&scores)[4]) {
  bool fits = bias.dim == 4;
  for (int64_t i = 0; fits && i < 4; ++i) fits = bias.sizes[i] == 1 || bias.sizes[i] == scores[i];
  STD_TORCH_CHECK(
      fits && bias.is_beside(q) &&
          (bias.dtype == q.dtype || bias.dtype == aoti_torch_dtype_float32()),
      "cute_attention: bias must have q's dtype or float32, be on q's device, and broadcast from "
      "four dimensions to [batch, heads, seqlen_q, seqlen_k]");
}

// A bias, or its gradient, whose last stride is 1 or belongs to a dimension of one number.
inline BiasTensor bias_of(TensorView const& bias) {
  auto const stride = [&](int i) { return bias.sizes[i] == 1 ? 0 : bias.strides[i]; };
  return {bias.data,
          stride(0),
          stride(1),
          stride(2),
          static_cast<int32_t>(stride(3)),
          bias.dtype == aoti_torch_dtype_float32()};
}

// Dropout with probability `p`, rounded to 256ths, halves up, as semantics/dropout.py does.
inline DropoutOptions dropout_of(double p, OptionalTensor const& seed, TensorView const& q) {
  if (p == 0) return {};
  STD_TORCH_CHECK(p > 0 && p <= 1, "cute_attention: dropout_p is ", p, ", expected 0 to 1");
  STD_TORCH_CHECK(
      seed && seed->is_beside(q) && seed->dtype == aoti_torch_dtype_int64() && seed->numel() == 1,
      "cute_attention: dropout_seed must be an int64 of one element on q's device");
  return {static_cast<uint64_t const*>(seed->data),
          static_cast<int32_t>(std::floor(256 * p + 0.5))};
}

// The dtypes, devices and shapes of q, k and v fit together.
inline void check_inputs(TensorView const& q, TensorView const& k, TensorView const& v,
                         bool packed) {
  int64_t const dim = packed ? 3 : 4;
  STD_TORCH_CHECK(q.dim == dim && k.dim == dim && v.dim == dim,
                  "cute_attention: q, k and v must have ", dim, " dimensions");
  STD_TORCH_CHECK(q.is_cuda && k.is_beside(q) && v.is_beside(q),
                  "cute_attention: q, k and v must be on one CUDA device");
  STD_TORCH_CHECK(
      (q.dtype == aoti_torch_dtype_float16() || q.dtype == aoti_torch_dtype_bfloat16()) &&
          k.dtype == q.dtype && v.dtype == q.dtype,
      "cute_attention: q, k and v must all be float16 or all bfloat16");
  bool const same_keys = k.sizes[0] == v.sizes[0] &&
                         (packed || (k.sizes[0] == q.sizes[0] && k.sizes[1] == v.sizes[1]));
  int64_t const heads = q.sizes[dim - 2], heads_kv = k.sizes[dim - 2];
  STD_TORCH_CHECK(heads_kv == 0 ? heads == 0 : heads % heads_kv == 0,
                  "cute_attention: the heads of k must divide those of q");
  STD_TORCH_CHECK(same_keys && heads_kv == v.sizes[dim - 2] && k.sizes[dim - 1] == q.sizes[dim - 1],
                  "cute_attention: the shapes of q, k and v do not match");
}

}  // namespace cute_attention
