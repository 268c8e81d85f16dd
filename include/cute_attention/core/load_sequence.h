// core/load_sequence.h: reads where a sequence of the batch starts and how long it is.
#pragma once

#include <type_traits>

#include "cute_attention/core/sequence.h"

namespace cute_attention {

// Returns the `value` of the warp's first thread to all threads of the warp, which call it
// together. The compiler then knows that the result is the same in all of them, and can keep it in
// a uniform register.
CUTE_DEVICE int32_t warp_uniform(int32_t value) { return __shfl_sync(0xffffffffu, value, 0); }
// The number of this warp in its CTA.
CUTE_DEVICE int32_t warp_of_cta() { return warp_uniform(int32_t(threadIdx.x) / 32); }

// Returns sequence `batch` of the problem. All threads of a warp call it together.
template <class Params>
CUTE_DEVICE Sequence load_sequence(Params const& params, int32_t batch) {
  int32_t row_q = 0, row_k = 0;
  int32_t seqlen_q = params.seqlen_q, seqlen_k = params.seqlen_k;
  if (params.cu_seqlens_q != nullptr) {
    row_q = warp_uniform(params.cu_seqlens_q[batch]);
    seqlen_q = warp_uniform(params.cu_seqlens_q[batch + 1]) - row_q;
  }
  if (params.cu_seqlens_k != nullptr) {
    row_k = warp_uniform(params.cu_seqlens_k[batch]);
    seqlen_k = warp_uniform(params.cu_seqlens_k[batch + 1]) - row_k;
  }
  if constexpr (std::is_same_v<Params, ForwardParams>) {
    KeyCache const& cache = params.cache;
    if (cache.seqused_k != nullptr) {
      // Nothing is read that the cache has no room for, whatever the lengths say.
      int32_t const used = max_of(
          min_of(warp_uniform(cache.seqused_k[batch]), cache.pages_per_sequence * cache.page_size),
          0);
      if (cache.leftpad_k != nullptr) {
        row_k = max_of(min_of(warp_uniform(cache.leftpad_k[batch]), used), 0);
      }
      seqlen_k = used - row_k;
    }
  }
  return make_sequence(seqlen_q, seqlen_k, row_q, row_k, params.window_left, params.window_right);
}

}  // namespace cute_attention
