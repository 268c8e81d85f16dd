// sm90/cached_keys.h: the kernel of a row that reads keys from a cache (core/key_pages.h).
//
// It is one of its own, since the load warp and the scheduler have little time where tiles are
// short: with both ways in one kernel, calls without a cache took up to 20 % longer (head dim 64,
// causal, 512 tokens, on an NVIDIA H200).
#pragma once

#include "cute_attention/config.h"
#include "cute_attention/study.h"

namespace cute_attention {
namespace sm90 {

template <class Row>
struct CachedKeys : Row {};

// Whether the kernel reads keys from a cache: this one, and that of a row with qv, whose calls have
// one.
template <class Row>
constexpr bool kReadsCache = has_qv(Row::kKey.score_mods);
template <class Row>
constexpr bool kReadsCache<CachedKeys<Row>> = true;

// Whether CTAs of a call may read the cache before the kernel has ended that appends to it.
CUTE_HOST_DEVICE constexpr bool begins_early(ForwardParams const& params) {
  return params.appended.seqused_k != nullptr;
}

// Whether a row has such a kernel beside the other.
template <class Row>
constexpr bool kHasCacheKernel = reads_cache(Row::kKey.score_mods) && !kReadsCache<Row>;

}  // namespace sm90

template <class Row>
struct StudyOf<sm90::CachedKeys<Row>> : StudyOf<Row> {};

}  // namespace cute_attention
