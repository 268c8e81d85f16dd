// check_params.h: refuses, before any launch, params that no kernel may get.
#pragma once

#include "cute_attention/append_params.h"
#include "cute_attention/params.h"

namespace cute_attention {

// All these functions throw std::invalid_argument, whose text names the argument, says what was
// expected and what came.

// Checks what does not depend on the tensors: sizes, masks, scale and softcap.
void check_shape(ForwardParams const& params);
void check_shape(BackwardParams const& params);

// Checks pointers and strides, after check_shape() and only for a call that has rows to write.
void check_tensors(ForwardParams const& params);
void check_tensors(BackwardParams const& params);

// Checks that a call has the workspaces of which its row needs at least one element. The others
// may be null, and so may those that a call can do without (BackwardParams says which).
void check_workspaces(BackwardParams const& params, BackwardWorkspace const& sizes);

// Checks a call that appends to a cache.
void check_append(AppendParams const& params);

// Whether k and v are a cache.
constexpr bool has_cache(ForwardParams const& p) { return p.cache.seqused_k != nullptr; }
constexpr bool has_cache(BackwardParams const&) { return false; }

// Whether qv.v joins the scores.
constexpr bool has_qv(ForwardParams const& p) { return p.qv != nullptr; }
constexpr bool has_qv(BackwardParams const&) { return false; }

// Whether the gradient of a bias is wanted, which has as many numbers as the lengths say.
constexpr bool has_grad_bias(ForwardParams const&) { return false; }
constexpr bool has_grad_bias(BackwardParams const& p) { return p.grad_bias.data != nullptr; }

// How many rows q and k have over the whole batch.
template <class Params>
constexpr int64_t rows_q(Params const& p) {
  return p.cu_seqlens_q == nullptr ? int64_t(p.batch) * p.seqlen_q : p.total_q;
}
template <class Params>
constexpr int64_t rows_k(Params const& p) {
  return p.cu_seqlens_k == nullptr ? int64_t(p.batch) * p.seqlen_k : p.total_k;
}

}  // namespace cute_attention
