// core/combine_row.h: what warps do to make one row of its splits (core/combine_splits.h).
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/combine_splits.h"
#include "cute_attention/core/split_steps.h"
#include "cute_attention/core/warp.h"

namespace cute_attention {

// The weights of the splits of a row, of which there are at most kMost. A warp has one row, or two
// of few columns, each in kLanes of its threads: thread `lane` of them has the weights of splits
// lane + kLanes * i. All threads of a warp call every function together.
template <int kMost, int kLanes = 32>
struct RowSplits {
  static constexpr int kCapacity = kMost;
  static constexpr int kOfThread = kMost / kLanes;
  float weights[kOfThread];
  float base;
  float sum;

  RowSplits() = default;
  CUTE_DEVICE RowSplits(ForwardParams const& params, int64_t row) {
    SplitSum sums[kOfThread];
    base = -INFINITY;
    CUTE_UNROLL
    for (int i = 0; i < kOfThread; ++i) {
      int const split = lane_of_warp() % kLanes + i * kLanes;
      sums[i] = {0.f, 0.f};
      if (split < params.num_splits) {
        float2 const read = __ldcg(reinterpret_cast<float2 const*>(split_sum(params, split, row)));
        sums[i] = {read.x, read.y};
      }
      base = fmaxf(base, split_base(sums[i]));
    }
    CUTE_UNROLL
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      base = fmaxf(base, __shfl_xor_sync(0xffffffffu, base, offset));
    }
    sum = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kOfThread; ++i) {
      weights[i] = split_weight(sums[i], base);
      // Not contracted: up to 32 splits have the same sum whatever kLanes is.
      sum += weights[i] == kUnseen ? 0.f : __fmul_rn(weights[i], sums[i].sum);
    }
    CUTE_UNROLL
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
  }

  // The weight of a split, the same one for all threads of the row; kUnseen past the last.
  CUTE_DEVICE float weight(int split) const {
    float found = weights[0];
    CUTE_UNROLL
    for (int i = 1; i < kOfThread; ++i) {
      found = split / kLanes == i ? weights[i] : found;
    }
    found = __shfl_sync(0xffffffffu, found, split % kLanes, kLanes);
    return split < kMost ? found : kUnseen;
  }
};

// The columns of a row that a warp has at a time: four of each thread.
constexpr int kCombinedCols = 4 * 32;
static_assert(kCombinedCols == kColsOfStep);

// What some splits of a row have of these columns: splits first, first + step, and so on.
struct SplitParts {
  static constexpr int kCount = kSplitsOfStep;  // loads that are under way at the same time
  float4 values[kCount];

  // Starts to read them. Of splits that saw no key this reads whatever is there.
  CUTE_DEVICE void load(ForwardParams const& params, int64_t row, int32_t col, int first,
                        int step) {
    float const* from = split_output(params, first, row) + col;
    int64_t const apart = step * lse_size(params) * params.head_dim_v;
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      values[i] = float4{0.f, 0.f, 0.f, 0.f};
      if (first + i * step < params.num_splits && col < params.head_dim_v) {
        values[i] = __ldcg(reinterpret_cast<float4 const*>(from));
      }
      from += apart;
    }
  }

  // Adds them up in their order, each times its weight.
  template <class Splits>
  CUTE_DEVICE void add_to(float4& total, Splits const& splits, int first, int step) const {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      float const weight = splits.weight(first + i * step);
      if (weight != kUnseen) {
        total.x += weight * values[i].x;
        total.y += weight * values[i].y;
        total.z += weight * values[i].z;
        total.w += weight * values[i].w;
      }
    }
  }
};

CUTE_DEVICE float4 sum_of(float4 const& a, float4 const& b) {
  return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// The weighted sum of this thread's columns, from col on, of the splits of a row that members
// first, first + step, and so on of the team have (core/split_steps.h), and the weights, which are
// read behind the first of the columns. Each part stands here once: this code comes from memory in
// each decode step, and takes longer than what it does.
template <class Splits>
CUTE_DEVICE float4 sum_of_members(ForwardParams const& params, Splits& splits, int64_t row,
                                  int32_t col, int team, int first = 0, int step = 1) {
  float4 total{0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int member = first; member < team; member += step) {
    float4 own{0.f, 0.f, 0.f, 0.f};
    int begin = 0;  // all members take as many turns
    do {
      SplitParts parts;
      parts.load(params, row, col, begin + member, team);
      if (begin == 0 && member == first) {
        splits = Splits(params, row);
      }
      parts.add_to(own, splits, begin + member, team);
      begin += SplitParts::kCount * team;
    } while (Splits::kCapacity > kMostMembers * kSplitsOfStep && begin < params.num_splits);
    total = member == first ? own : sum_of(total, own);
  }
  return total;
}

// Where a row of the output is.
template <class Element>
struct RowTarget {
  int32_t head;
  Element* o;
  float* lse;  // null: none
};

// Writes this thread's columns of a row, from col on, and with the first column its LSE.
template <class Element, class Splits>
CUTE_DEVICE void store_combined(ForwardParams const& params, Splits const& splits,
                                RowTarget<Element> const& target, float4 const& total,
                                int32_t col) {
  CombinedRow const row =
      combined_row(splits.base, splits.sum,
                   params.sink == nullptr ? nullptr : params.sink + target.head, params.dropout);
  if (col < params.head_dim_v) {
    *reinterpret_cast<uint2*>(target.o + col) =
        uint2{pack<Element>(total.x * row.factor, total.y * row.factor),
              pack<Element>(total.z * row.factor, total.w * row.factor)};
  }
  if (target.lse != nullptr && col == 0) {
    *target.lse = row.lse;
  }
}

}  // namespace cute_attention
