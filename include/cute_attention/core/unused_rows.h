// core/unused_rows.h: the rows of packed outputs that belong to no sequence.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/params.h"

namespace cute_attention {

// Rows after the last sequence's, where there are any: output 0, LSE -infinity. Thread `thread` of
// the `threads` that share the work.
template <class Element>
CUTE_DEVICE void clear_unused_rows(ForwardParams const& params, int64_t thread, int64_t threads) {
  if (params.cu_seqlens_q == nullptr) {
    return;
  }
  int64_t const first = params.cu_seqlens_q[params.batch];
  int32_t const vectors = params.head_dim_v / 8;  // of 16 bytes
  int64_t const rows = (params.total_q - first) * params.heads;
  for (int64_t i = thread; i < rows * vectors; i += threads) {
    int64_t const row = first + i / vectors / params.heads, head = i / vectors % params.heads;
    auto* const o = static_cast<Element*>(params.o) + row * params.o_stride.row +
                    head * params.o_stride.head + i % vectors * 8;
    *reinterpret_cast<uint4*>(o) = uint4{};
    if (params.lse != nullptr && i % vectors == 0) {
      params.lse[head * params.total_q + row] = -INFINITY;
    }
  }
}

}  // namespace cute_attention
