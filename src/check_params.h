// check_params.h: refuses params that a kernel may not be given, before anything is launched.
#pragma once

#include "cute_attention/params.h"

namespace cute_attention {

// Sizes, masks and numbers: what can be wrong before there are tensors. These throw
// std::invalid_argument, whose text names the argument, what was expected and what came.
void check_shape(ForwardParams const& params);
void check_shape(BackwardParams const& params);

// Pointers and strides of a call that has rows to write, whose shape is right.
void check_tensors(ForwardParams const& params);
void check_tensors(BackwardParams const& params);

// Rows of q and of k over the whole batch.
template <class Params>
constexpr int64_t rows_q(Params const& p) {
  return p.cu_seqlens_q == nullptr ? int64_t(p.batch) * p.seqlen_q : p.total_q;
}
template <class Params>
constexpr int64_t rows_k(Params const& p) {
  return p.cu_seqlens_k == nullptr ? int64_t(p.batch) * p.seqlen_k : p.total_k;
}

}  // namespace cute_attention
