// grad_problem.h: calls of the backward for tests of how its steps are divided among CTAs.
#pragma once

#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention {

constexpr int kTileM = 64;
constexpr int kTileN = 128;
constexpr int kCtas = 132;
constexpr int64_t kL2Bytes = 50 << 20;

// A call whose queries and keys are at address 0 or behind it: nobody reads them.
inline BackwardParams problem(int batch, int seqlen_q, int seqlen_k, int heads, int heads_kv,
                              bool causal = false) {
  BackwardParams params{};
  params.batch = batch;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.heads = heads;
  params.heads_kv = heads_kv;
  params.head_dim = params.head_dim_v = 128;
  params.window_left = kUnbounded;
  params.window_right = causal ? 0 : kUnbounded;
  params.q_stride = params.grad_o_stride = {int64_t(seqlen_q) * heads * 128, heads * 128, 128};
  return params;
}

inline Sequence sequence_of(BackwardParams const& params) {
  return make_sequence(params.seqlen_q, params.seqlen_k, 0, 0, params.window_left,
                       params.window_right);
}

}  // namespace cute_attention
