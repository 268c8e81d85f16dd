// core/sink.h: attention sinks. The sink of a head is a logit that joins the denominator of the
// softmax of all its rows, and that has no value:
//
//   P(i, j) = exp(S(i, j) - LSE(i))    LSE(i) = log(sum over j of exp(S(i, j)) + exp(sink))
//
// So the forward adds it when a row has seen all its keys, and the backward's scores know nothing
// of it: they only read the LSE. With delta as backward_prepare.h writes it,
//
//   dsink = keep_scale() * sum over the rows i of its head of exp(sink - LSE(i)) * delta(i)
//
// A sink of +infinity has all the weight: output 0, LSE +infinity, and every share is 1.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/work_tile.h"
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

// The rows of one head over all sequences of a batch, dealt out to threads: a thread takes every
// `threads`-th of them. The rows of packed sequences follow each other as those of one sequence do.
struct HeadRows {
  int32_t sequences;
  int32_t rows;            // of a sequence
  int64_t distance;        // of the same rows of two sequences, in numbers of the LSE
  int32_t step_sequences;  // `threads` rows are so many sequences,
  int32_t step_rows;       // and so many rows
  int32_t sequence;        // where the thread is
  int32_t row;

  CUTE_HOST_DEVICE constexpr HeadRows(int32_t sequences, int32_t rows, int64_t distance,
                                      int32_t threads, int32_t thread)
      : sequences(rows == 0 ? 0 : sequences),
        rows(rows),
        distance(distance),
        step_sequences(rows == 0 ? 0 : threads / rows),
        step_rows(rows == 0 ? 0 : threads % rows),
        sequence(rows == 0 ? 0 : thread / rows),
        row(rows == 0 ? 0 : thread % rows) {}

  CUTE_HOST_DEVICE constexpr bool inside() const { return sequence < sequences; }
  // Where the row lies behind the head's first, in numbers of the LSE.
  CUTE_HOST_DEVICE constexpr int64_t place() const { return sequence * distance + row; }
  // Moves on to the thread's next row; only where it is inside.
  CUTE_HOST_DEVICE constexpr void advance() {
    sequence += step_sequences;
    row += step_rows;
    if (row >= rows) {
      row -= rows;
      ++sequence;
    }
  }
};

// Whether the CTA that has a tile of queries in the kernel after the backward kernel writes the
// gradient of its head's sink. One CTA of each head does. That kernel takes the tiles from the last
// to the first (work_tile), so this CTA is the first of its head: the last one would still add when
// all others have ended.
CUTE_HOST_DEVICE constexpr bool writes_sink_gradient(BackwardParams const& params,
                                                     WorkTile const& work) {
  return params.grad_sink != nullptr && work.batch == params.batch - 1 && work.m_block == 0;
}

// Writes the gradient of the sink of `head`. All kThreads threads of a CTA call it. They read what
// backward_prepare wrote for the head's queries, two floats each, and add in an order that depends
// on the shapes alone: the result is bitwise the same in every run. A query that backward_prepare
// takes for one that sees nothing (kLowestLseLog2) adds nothing.
//
//   kPadded   whether these numbers are padded (core/grad_tile.h)
//   partial   (kThreads / 32)  room in shared memory
template <int kThreads, bool kPadded>
CUTE_DEVICE void write_sink_gradient(BackwardParams const& params, int32_t head, float* partial) {
  constexpr int kAhead = 8;  // loads that are under way at the same time
  int const thread = int(threadIdx.x);
  bool const packed = params.cu_seqlens_q != nullptr;
  float const sink_log2 = params.sink[head] * float(M_LOG2E);
  bool const whole = sink_log2 == INFINITY;  // all shares are 1: exp2(inf - inf) would be NaN
  Sequence const first{};
  float const* const delta = params.delta + number_index<kPadded>(params, first, 0, head, 0);
  float const* const lse_log2 = delta + numbers_size<kPadded>(params);
  // Between packed sequences lie numbers of queries that see nothing, where they are padded; after
  // the last one nothing has been written.
  int32_t rows_of_head = params.seqlen_q;
  if (packed) {
    int32_t const end = params.cu_seqlens_q[params.batch];
    rows_of_head =
        kPadded ? number_blocks(params).first(params.batch, 0, end) * kNumberRows : int64_t{end};
  }
  HeadRows rows(packed ? 1 : params.batch, rows_of_head,
                packed ? 0 : number_index<kPadded>(params, first, 1, 0, 0), kThreads, thread);
  float sum = 0.f;
  while (rows.inside()) {
    float lses[kAhead], deltas[kAhead];
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      bool const inside = rows.inside();
      lses[i] = inside ? lse_log2[rows.place()] : INFINITY;  // adds nothing, whatever the sink
      deltas[i] = inside ? delta[rows.place()] : 0.f;
      if (inside) {
        rows.advance();
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      sum += (whole ? 1.f : exp2f(sink_log2 - lses[i])) * deltas[i];
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
    params.grad_sink[head] = sum * keep_scale(params.dropout);
  }
  __syncthreads();  // partial may be used again
}

}  // namespace cute_attention
