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

// How many warps load. Pages of few tokens are many boxes, of which each takes about 90 clocks to
// issue: a kernel that reads a cache has one warp for Q and K, and one for V. Where qv joins the
// scores, K and V are the same bytes.
template <class Row>
constexpr int kLoadWarps = 1;
template <class Row>
constexpr int kLoadWarps<CachedKeys<Row>> = 2;

// Whether the kernel can take tiles from a counter (forward_schedule.h).
template <class Row>
constexpr bool kTakesTiles = !has_qv(Row::kKey.score_mods);

}  // namespace sm90

template <class Row>
struct StudyOf<sm90::CachedKeys<Row>> : StudyOf<Row> {};

}  // namespace cute_attention
