// core/unused_rows.h: the rows of packed outputs that belong to no sequence.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/params.h"

namespace cute_attention {

// Rows after the last sequence's, where there are any: output 0, LSE -infinity. Each of `warps`
// warps clears its share.
template <class Element>
CUTE_DEVICE void clear_unused_rows(ForwardParams const& params, int32_t warp, int32_t warps) {
  if (params.cu_seqlens_q == nullptr) {
    return;
  }
  int32_t const lane = int32_t(threadIdx.x) % 32;
  int64_t row = int64_t(params.cu_seqlens_q[params.batch]) + warp;
  for (; row < params.total_q; row += warps) {
    for (int32_t head = 0; head < params.heads; ++head) {
      auto* const o =
          static_cast<Element*>(params.o) + row * params.o_stride.row + head * params.o_stride.head;
      for (int32_t col = 8 * lane; col < params.head_dim_v; col += 8 * 32) {
        *reinterpret_cast<uint4*>(o + col) = uint4{};
      }
      if (params.lse != nullptr && lane == 0) {
        params.lse[head * params.total_q + row] = -INFINITY;
      }
    }
  }
}

}  // namespace cute_attention
