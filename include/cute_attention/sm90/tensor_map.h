// sm90/tensor_map.h: TMA descriptors, made on the host for each launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "cute_attention/params.h"
#include "cute_attention/sm90/tma_boxes.h"

namespace cute_attention::sm90 {

// A [batch, rows, heads, cols] tensor of 16-bit elements, cols contiguous.
struct TensorView {
  void const* data;
  int64_t batch;
  int64_t rows;
  int64_t heads;
  int64_t cols;
  Strides stride;  // in elements
};

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// cuTensorMapEncodeTiled of the driver, found once: the library is not linked with libcuda.
inline TensorMapEncoder tensor_map_encoder() {
  static auto const encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t const error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    bool const usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return usable ? reinterpret_cast<TensorMapEncoder>(function) : nullptr;
  }();
  return encoder;
}

// A box as TMA copies it into shared memory: row-major, its cols the fastest.
struct Box {
  int32_t cols;
  int32_t heads;  // of a group
  int32_t rows;
};

// Describes boxes of `view` to the TMA unit (CUDA Driver API, "Tensor Map Object Management"),
// whose heads come in groups of `group`. A box arrives in shared memory with cols fastest, then
// heads, then rows, swizzled within its columns; what lies outside the view, or in a box past
// the end of a group, is filled with zeros. Coordinates are (col, head of the group, row, group,
// batch). `fetched` is how many bytes L2 fetches from memory together.
template <class Element>
cudaError_t make_tensor_map(CUtensorMap* map, TensorView const& view, int32_t group, Box const& box,
                            CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static_assert(sizeof(Element) == 2);
  auto const encode = tensor_map_encoder();
  if (encode == nullptr) {
    return cudaErrorNotSupported;
  }
  // The stride of a dimension of one element is never used, and may be anything: give it one that
  // is allowed.
  auto const bytes = [&](int64_t extent, int64_t stride) {
    return cuuint64_t(extent > 1 ? stride * 2 : 16);
  };
  int64_t const groups = view.heads / group;
  cuuint64_t const extents[] = {cuuint64_t(view.cols), cuuint64_t(group), cuuint64_t(view.rows),
                                cuuint64_t(groups), cuuint64_t(view.batch)};
  cuuint64_t const strides[] = {bytes(group, view.stride.head), bytes(view.rows, view.stride.row),
                                bytes(groups, view.stride.head * group),
                                bytes(view.batch, view.stride.batch)};
  cuuint32_t const sizes[] = {cuuint32_t(box.cols), cuuint32_t(box.heads), cuuint32_t(box.rows), 1,
                              1};
  cuuint32_t const element_strides[] = {1, 1, 1, 1, 1};
  CUtensorMapSwizzle const swizzles[] = {CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_32B,
                                         CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B};
  CUresult const result =
      encode(map,
             std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                      : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             5, const_cast<void*>(view.data), extents, strides, sizes, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzles[box_swizzle_bits(box.cols)], fetched,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(result);  // errors of both have the same numbers
}

}  // namespace cute_attention::sm90
