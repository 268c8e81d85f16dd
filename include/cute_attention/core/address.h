// core/address.h: where a row of a head lies in memory.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention {

// The first element of row `row` of `head` in a tensor [batch, seqlen, heads, head_dim] that begins
// at `tensor`. A packed tensor has one row after the other for all sequences and stride.batch is 0,
// so its rows count from the start of the tensor: sequence.row_q + query, or sequence.row_k + key.
// In a tensor that is not packed row_q and row_k are 0.
template <class Element>
CUTE_HOST_DEVICE constexpr Element* row_pointer(Element* tensor, Strides const& stride,
                                                int32_t batch, int32_t head, int64_t row) {
  return tensor + batch * stride.batch + head * stride.head + row * stride.row;
}

// Which number of the LSE belongs to query `query` of a sequence, counted from the sequence's
// start. The LSE is [batch, heads, seqlen_q], or packed [heads, total_q]; delta has the same shape.
template <class Params>
CUTE_HOST_DEVICE constexpr int64_t lse_index(Params const& params, Sequence const& sequence,
                                             int32_t batch, int32_t head, int64_t query) {
  int64_t const first = params.cu_seqlens_q == nullptr
                            ? (int64_t(batch) * params.heads + head) * params.seqlen_q
                            : head * params.total_q + sequence.row_q;
  return first + query;
}

}  // namespace cute_attention
