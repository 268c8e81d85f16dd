// core/load_sequence.h: reads where a sequence of the batch starts and how long it is.
#pragma once

#include "cute_attention/config.h"
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
  return make_sequence(seqlen_q, seqlen_k, row_q, row_k, params.window_left, params.window_right);
}

// How many keys of a sequence the kernel before appends (AppendedKeys).
CUTE_DEVICE int32_t appended_keys(AppendedKeys const& appended, int32_t batch) {
  int32_t const* const ends = appended.cu_seqlens;
  return ends == nullptr ? appended.seqlen : warp_uniform(ends[batch + 1] - ends[batch]);
}

// How many tokens a sequence has in a cache of `room` tokens. What the kernel before writes is not
// read where that kernel may still run.
template <bool kBeginsEarly>
CUTE_DEVICE int32_t tokens_in_cache(ForwardParams const& params, int32_t batch, int32_t room) {
  if (kBeginsEarly && params.appended.seqused_k != nullptr) {
    int64_t const before = warp_uniform(params.appended.seqused_k[batch]);
    int64_t const used = before + appended_keys(params.appended, batch);
    return int32_t(used < 0 ? 0 : used < room ? used : room);
  }
  return max_of(min_of(warp_uniform(params.cache.seqused_k[batch]), room), 0);
}

// The same as load_sequence() for a forward kernel, whose keys may lie in a cache if kReadsCache,
// and which may run beside the kernel that appends to it if kBeginsEarly.
template <bool kReadsCache, bool kBeginsEarly = false>
CUTE_DEVICE Sequence load_sequence_of(ForwardParams const& params, int32_t batch) {
  Sequence const sequence = load_sequence(params, batch);
  KeyCache const& cache = params.cache;
  if (!kReadsCache || cache.seqused_k == nullptr) {
    return sequence;
  }
  // Nothing is read that there is no room for, whatever the lengths say.
  int32_t const room = cache.pages_per_sequence * cache.page_size;
  int32_t const used = tokens_in_cache<kBeginsEarly>(params, batch, room);
  int32_t const padding =
      cache.leftpad_k == nullptr ? 0 : min_of(warp_uniform(cache.leftpad_k[batch]), used);
  int32_t const row_k = max_of(padding, 0);
  return make_sequence(sequence.seqlen_q, used - row_k, sequence.row_q, row_k, params.window_left,
                       params.window_right);
}

}  // namespace cute_attention
