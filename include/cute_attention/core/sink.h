// core/sink.h: attention sinks. The sink of a head is a logit that joins the denominator of the
// softmax of all its rows, and that has no value:
//
//   P(i, j) = exp(S(i, j) - LSE(i))    LSE(i) = log(sum over j of exp(S(i, j)) + exp(sink))
//
// So the forward adds it when a row has seen all its keys, and the backward's scores know nothing
// of it: they only read the LSE. With delta = dLSE - rowsum(dO * O) as everywhere,
//
//   dsink = sum over the rows i of its head of exp(sink - LSE(i)) * delta(i)
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/grad_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

// Joins a sink to a row whose keys alone have the LSE `lse` (-infinity if it sees none), and whose
// output would be multiplied by `factor`. All logits are natural.
CUTE_HOST_DEVICE void join_sink(float sink, float& factor, float& lse) {
  bool const empty = lse == -INFINITY;  // also keeps -infinity - -infinity out of the sums below
  float const above = empty ? 0.f : sink - lse;
  factor /= 1.f + exp2f(above * float(M_LOG2E));
  float const sum =
      fmaxf(lse, sink) + log2f(1.f + exp2f(-fabsf(above) * float(M_LOG2E))) * float(M_LN2);
  lse = empty ? sink : sum;
}

// Joins the sinks, if the call has any, to the rows (ROWS) of a thread: head(row) has row `row`.
template <class Rows, class Head>
CUTE_DEVICE void join_sinks(ForwardParams const& params, Head const& head, Rows& factors,
                            Rows& lse) {
  CUTE_STATIC_ASSERT_V(cute::size(factors) == cute::size(lse));
  if (params.sink == nullptr) {
    return;
  }
  CUTE_UNROLL
  for (int row = 0; row < cute::size(lse); ++row) {
    join_sink(params.sink[head(row)], factors(row), lse(row));
  }
}

// The LSE of a row that sees no key.
CUTE_DEVICE float empty_lse(ForwardParams const& params, int32_t head) {
  return params.sink == nullptr ? -INFINITY : params.sink[head];
}

// Writes the gradient of the sink of `head`. All kThreads threads of a CTA call it, once for each
// head. They read what backward_prepare wrote for the head's queries, two floats each, and add in
// an order that depends on the shapes alone: the result is bitwise the same in every run.
//
//   partial   (kThreads / 32)  room in shared memory
template <int kThreads>
CUTE_DEVICE void write_sink_gradient(BackwardParams const& params, int32_t head, float* partial) {
  int const thread = int(threadIdx.x);
  bool const packed = params.cu_seqlens_q != nullptr;
  float const sink_log2 = params.sink[head] * float(M_LOG2E);
  // The rows of packed sequences follow each other as those of one do, up to the last sequence's.
  int32_t const batch = packed ? 1 : params.batch;
  int32_t const rows = packed ? params.cu_seqlens_q[params.batch] : params.seqlen_q;
  int64_t const rows_of_a_head = packed ? params.total_q : params.seqlen_q;
  float const* const delta = params.delta + head * rows_of_a_head;
  float const* const lse_log2 = delta + lse_size(params);
  float sum = 0.f;
  // A thread takes every kThreads-th row, over all sequences.
  int32_t sequence = rows == 0 ? batch : thread / rows;
  int32_t row = rows == 0 ? 0 : thread % rows;
  while (sequence < batch) {
    int64_t const place = int64_t(sequence) * params.heads * rows_of_a_head + row;
    sum += exp2f(sink_log2 - lse_log2[place]) * delta[place];
    sequence += kThreads / rows;
    row += kThreads % rows;
    if (row >= rows) {
      row -= rows;
      ++sequence;
    }
  }
  CUTE_UNROLL
  for (int offset = 16; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  partial[thread / 32] = sum;
  __syncthreads();  // the sums of all warps are there
  if (thread == 0) {
    CUTE_UNROLL
    for (int warp = 1; warp < kThreads / 32; ++warp) {
      sum += partial[warp];
    }
    params.grad_sink[head] = sum;
  }
  __syncthreads();  // partial may be used again
}

}  // namespace cute_attention
