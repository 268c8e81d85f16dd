// core/unused_rows.h: the rows of packed outputs that belong to no sequence.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/work_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

// `cols` elements of 16 bits, a multiple of 8, become zeros. All threads of a warp call it.
template <class Element>
CUTE_DEVICE void clear_row(Element* row, int32_t cols) {
  for (int32_t col = 8 * (int32_t(threadIdx.x) % 32); col < cols; col += 8 * 32) {
    *reinterpret_cast<uint4*>(row + col) = uint4{};
  }
}

// Rows after the last sequence's, where there are any: output 0, LSE -infinity. Each warp
// clears its share.
template <class Element>
CUTE_DEVICE void clear_unused_rows(ForwardParams const& params, GridWarp const& warp) {
  if (params.cu_seqlens_q == nullptr) {
    return;
  }
  int64_t row = int64_t(params.cu_seqlens_q[params.batch]) + warp.index;
  for (; row < params.total_q; row += warp.count) {
    for (int32_t head = 0; head < params.heads; ++head) {
      clear_row(
          static_cast<Element*>(params.o) + row * params.o_stride.row + head * params.o_stride.head,
          params.head_dim_v);
      if (params.lse != nullptr && int32_t(threadIdx.x) % 32 == 0) {
        params.lse[head * params.total_q + row] = -INFINITY;
      }
    }
  }
}

}  // namespace cute_attention
