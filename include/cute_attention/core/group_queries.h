// core/group_queries.h: a call with one query a sequence, told as one in which the query heads of a
// KV head are its queries.
#pragma once

#include "cute_attention/params.h"

namespace cute_attention {

// Whether the heads that read one KV head can be queries of one head: each sequence has one query,
// which sees all keys, and nothing depends on the head or the place of a query. Bits that depend on
// no length are left as they are.
constexpr bool has_groups_of_single_queries(ForwardParams const& p) {
  bool const depends_on_heads = p.sink != nullptr || p.alibi_slopes.data != nullptr ||
                                p.bias.data != nullptr || p.dropout.seed != nullptr ||
                                p.qv != nullptr;
  return p.seqlen_q == 1 && p.cu_seqlens_q == nullptr && p.heads > p.heads_kv &&
         p.window_left == kUnbounded && p.batch_invariant == 0 && !depends_on_heads;
}

// The same call where it can be told so, else the call as it is. Query i of head h is query 0 of
// head h * group + i, in q, in the output, in the LSE and in the workspace of splits. Row by row
// their addresses are what they were: in decoding with 8 query heads a KV head, a CTA computes 8
// rows of a tile and reads K and V once, where 8 CTAs computed a row each.
constexpr ForwardParams with_groups_as_queries(ForwardParams const& params) {
  if (!has_groups_of_single_queries(params)) {
    return params;
  }
  int32_t const group = params.heads / params.heads_kv;
  ForwardParams p = params;
  p.heads = p.heads_kv;
  p.seqlen_q = group;
  p.window_right = kUnbounded;  // the one query is the last: it sees what is left of it
  p.q_stride = {p.q_stride.batch, p.q_stride.head, p.q_stride.head * group};
  p.o_stride = {p.o_stride.batch, p.o_stride.head, p.o_stride.head * group};
  return p;
}

}  // namespace cute_attention
