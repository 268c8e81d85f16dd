// core/unused_rows.h: the rows of packed outputs that belong to no sequence.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/params.h"

namespace cute_attention {

// Rows [first, total) of a packed tensor become zeros. Each of `warps` warps clears its share.
//   tensor  [total, heads, cols], cols a multiple of 8, of 16 bits each
template <class Element>
CUTE_DEVICE void clear_rows(Element* tensor, Strides const& stride, int64_t first, int64_t total,
                            int32_t heads, int32_t cols, int32_t warp, int32_t warps) {
  int32_t const lane = int32_t(threadIdx.x) % 32;
  for (int64_t row = first + warp; row < total; row += warps) {
    for (int32_t head = 0; head < heads; ++head) {
      for (int32_t col = 8 * lane; col < cols; col += 8 * 32) {
        *reinterpret_cast<uint4*>(tensor + row * stride.row + head * stride.head + col) = uint4{};
      }
    }
  }
}

// Rows after the last sequence's, where there are any: output 0, LSE -infinity. Each of `warps`
// warps clears its share.
template <class Element>
CUTE_DEVICE void clear_unused_rows(ForwardParams const& params, int32_t warp, int32_t warps) {
  if (params.cu_seqlens_q == nullptr) {
    return;
  }
  int64_t const first = params.cu_seqlens_q[params.batch];
  clear_rows(static_cast<Element*>(params.o), params.o_stride, first, params.total_q, params.heads,
             params.head_dim_v, warp, warps);
  if (params.lse != nullptr) {
    for (int64_t row = first + warp; row < params.total_q; row += warps) {
      for (int32_t head = int32_t(threadIdx.x) % 32; head < params.heads; head += 32) {
        params.lse[head * params.total_q + row] = -INFINITY;
      }
    }
  }
}

}  // namespace cute_attention
