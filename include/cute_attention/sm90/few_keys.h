// sm90/few_keys.h: backward calls of which no sequence has more than 64 keys: windows of 49 tokens,
// cross-attention to a short text. A warpgroup owns 64 keys, so the second one of a CTA would have
// none; and a head has so few steps that a CTA mostly waits: for its Q, for one product, for the
// next. So these calls have a kernel with one consumer warpgroup, of which two CTAs share an SM:
// one computes while the other waits.
#pragma once

#include "cute_attention/config.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/sm90/warpgroup.h"
#include "cute_attention/study.h"

namespace cute_attention::sm90 {

// The row with tiles of 64 queries and 64 keys, which has kernels and launches of its own.
template <class Row>
struct FewKeys : Row {
  static constexpr KernelConfig kConfig = {kWarpgroupM, kWarpgroupM, 2, 2 * kWarpgroupWarps};
};

template <class Row>
constexpr bool kIsFewKeys = false;
template <class Row>
constexpr bool kIsFewKeys<FewKeys<Row>> = true;

// Whether a row has these kernels. They compute dQ in the step itself, since there is no other
// warpgroup to wait for; so a row for study that chooses when dQ is computed does not have them.
template <class Row>
constexpr bool kHasFewKeys =
    !kIsFewKeys<Row> && Row::kKey.head_dim <= 64 && Row::kKey.score_mods == score_mods::None &&
    StudyOf<Row>::kGradQ == GradQ::WhereItPays;

// Whether a call takes them, on a row that has them: they write dQ, and keep no sums of it.
constexpr bool has_few_keys(BackwardParams const& params) {
  return has_one_adder(params, kWarpgroupM, kWarpgroupM);
}

}  // namespace cute_attention::sm90

namespace cute_attention {
template <class Row>
struct StudyOf<sm90::FewKeys<Row>> : StudyOf<Row> {};
}  // namespace cute_attention
