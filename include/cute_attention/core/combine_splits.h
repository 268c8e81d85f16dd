// core/combine_splits.h: the splits of a row (core/key_splits.h) made one row again.
#pragma once

#include "cute_attention/config.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/key_splits.h"
#include "cute_attention/core/sink.h"

namespace cute_attention {

// The base to which the splits of a row are brought is the largest of these. One that saw no key
// has none.
CUTE_HOST_DEVICE float split_base(SplitSum const& split) {
  return split.sum == 0.f ? -INFINITY : split.base;
}

// Marks a split that saw no key of the row: nothing may read its output.
constexpr float kUnseen = -1.f;

// What the output of a split is multiplied by where `base` is the largest of the row; kUnseen where
// it is not to be read. NaN where the split has seen NaN.
CUTE_HOST_DEVICE float split_weight(SplitSum const& split, float base) {
  // Equal bases may be infinite where a split has seen NaN. Its sum says so.
  return split.sum == 0.f ? kUnseen : split.base == base ? 1.f : exp2f(split.base - base);
}

// What a row ends with: its output is the weighted sum of those of its splits times `factor`.
struct CombinedRow {
  float factor;
  float lse;  // natural
};

//   base  the largest of its splits
//   sum   the sum of the splits' sums times their weights; 0 where the row sees no key
//   sink  the one of its head; null: none
CUTE_HOST_DEVICE CombinedRow combined_row(float base, float sum, float const* sink,
                                          DropoutOptions const& dropout) {
  bool const empty = sum == 0.f;
  CombinedRow row{empty ? 0.f : 1.f / sum, empty ? -INFINITY : (base + log2f(sum)) * float(M_LN2)};
  if (sink != nullptr) {
    join_sink(*sink, row.factor, row.lse);
  }
  row.factor *= keep_scale(dropout);
  return row;
}

// Launches the kernel that writes the output and the LSE of a call from the workspace that its
// splits have filled, behind them in the same stream. Rows of no sequence are left alone. `key` is
// that of the row whose splits they are. Returns the cudaError_t of the launch.
int32_t combine_splits(ForwardParams const& params, KernelKey const& key, void* stream);

}  // namespace cute_attention
