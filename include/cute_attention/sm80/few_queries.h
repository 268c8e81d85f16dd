// sm80/few_queries.h: the kernel that a row has for few queries (core/few_queries.h), as a row.
#pragma once

#include "cute_attention/core/few_queries.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/study.h"

namespace cute_attention {
namespace sm80 {

template <class Row>
struct FewQueries : Row {
  static constexpr KernelConfig kConfig = few_queries_config(Row::kConfig);
};

// Whether the heads that read one KV head share tiles.
template <class Row>
constexpr bool kPacksHeads = false;
template <class Row>
constexpr bool kPacksHeads<FewQueries<Row>> = true;

// Whether a row has such a kernel beside its own.
template <class Row>
constexpr bool kHasFewQueriesKernel =
    has_few_queries_kernel(Row::kKey, Row::kConfig) && !kPacksHeads<Row>;

// What that kernel is given.
struct PackedForwardParams : ForwardParams {
  QueryPacking packing;
};

// The tiles of one sequence are those of a sequence with so many heads that have tiles of their
// own (work_tile.h).
struct PackedHeads {
  int32_t seqlen_q;
  int32_t heads;
};
CUTE_HOST_DEVICE constexpr PackedHeads packed_heads(PackedForwardParams const& params) {
  return {params.seqlen_q, params.heads_kv * params.packing.parts};
}

}  // namespace sm80

template <class Row>
struct StudyOf<sm80::FewQueries<Row>> : StudyOf<Row> {};

}  // namespace cute_attention
