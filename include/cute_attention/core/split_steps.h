// core/split_steps.h: who combines the splits of a tile of queries: the warpgroup that ends the
// last one, or a kernel for all tiles. The launch decides by it, and so does the choice of the
// splits.
#pragma once

#include <cstdint>

#include "cute_attention/config.h"
#include "cute_attention/params.h"

namespace cute_attention {

// What a warp reads at a time of a row: some columns of some splits (core/combine_row.h).
constexpr int32_t kColsOfStep = 128, kSplitsOfStep = 8;

// The splits of a row are added up by teams, so that warps of a kernel can share them: member m of
// `size` has the splits m, m + size, and so on, in their order, and then the members are added up
// in theirs. A single warp does so too, so that the bits are the same whoever combines them. A
// member has no more than it reads in a step, as long as there are warps.
constexpr int32_t kMostMembers = 8;
constexpr int32_t team_size(int32_t num_splits) {
  int32_t size = 1;
  while (size < kMostMembers && size * kSplitsOfStep < num_splits) {
    size *= 2;
  }
  return size;
}

// The steps of a warp that combines its quarter of the rows of a warpgroup.
constexpr int64_t combine_steps(int32_t rows, int32_t num_splits, int32_t head_dim_v) {
  int64_t const team = team_size(num_splits), of_members = team * kSplitsOfStep;
  return (rows + 3) / 4 * int64_t((head_dim_v + kColsOfStep - 1) / kColsOfStep) *
         (team * ((num_splits + of_members - 1) / of_members));
}

// Whether the last split combines them faster than the kernel does, which starts later but shares
// its steps among more warps. It combines no more than kMostOfLast, a weight for each thread of a
// warp.
constexpr int32_t kMostOfLast = 32;
//   rows  of the tile that a warpgroup has
constexpr bool last_split_combines(int32_t rows, int32_t num_splits, int32_t head_dim_v) {
  return num_splits <= kMostOfLast && combine_steps(rows, num_splits, head_dim_v) <= 3;
}

// Whether a row has a kernel in which it can, for a call: the one of sm90 that reads a cache, where
// queries are not packed. In that of a row with qv two warpgroups have the columns of a row.
constexpr bool last_split_may_combine(KernelKey const& key, ForwardParams const& params) {
  return key.arch == Arch::Sm90 && reads_cache(key.score_mods) && !has_qv(key.score_mods) &&
         params.cache.seqused_k != nullptr && params.cu_seqlens_q == nullptr;
}

}  // namespace cute_attention
