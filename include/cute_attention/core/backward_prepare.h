// core/backward_prepare.h: the kernel that runs before the backward kernel: delta, the LSE in base
// 2, and the starting values of all that the backward adds to or leaves out.
//
// A CTA has a tile of queries of one head. A packed sequence may be longer than params.seqlen_q,
// the length that the grid was made for; then a CTA prepares every m_blocks-th tile of the sequence
// from its own on, so that no tile is left out.
#pragma once

#include <cutlass/array.h>

#include <cute/config.hpp>

#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention {

// Rows [first, last) of `heads` heads of a packed gradient are filled. Each warp fills its share.
//   gradient  [total, heads, cols]
template <class Element>
CUTE_DEVICE void fill_rows(Element* gradient, Strides const& stride, int64_t first, int64_t last,
                           int heads, int cols, GridWarp const& warp, uint32_t filling) {
  for (int64_t row = first + warp.index; row < last; row += warp.count) {
    for (int head = 0; head < heads; ++head) {
      fill_row(gradient + row * stride.row + head * stride.head, cols, filling);
    }
  }
}

// Before: delta = dLSE - rowsum(dO * O), the LSE in units of log2(e), zeros for the sums of dQ and
// their turns, and for rows of no sequence; NaN where the backward kernel's grid lacks keys.
template <class Traits>
struct BackwardPrepare {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kRowThreads = 8;  // neighbours that share a row: 128 bytes a load
  static constexpr int kVector = 16 / int(sizeof(Element));  // elements of one load
  using Vector = cutlass::AlignedArray<Element, kVector>;

  CUTE_DEVICE static void run(BackwardParams const& params, WorkTile const& work) {
    if (params.cu_seqlens_q != nullptr) {
      clear_unused_rows(params);
    }
    Sequence const sequence = load_sequence(params, work.batch);
    // Keys that the CTAs of the backward kernel have: all, unless the sequence is longer than its
    // grid was made for.
    int const keys = ceil_div(params.seqlen_k, kTileN) * kTileN;
    if (keys < sequence.seqlen_k) {
      mark_keys_without_tile(params, work, sequence, keys);
    }
    int const m_blocks = ceil_div(params.seqlen_q, kTileM);
    for (int m_block = work.m_block; m_block * kTileM < sequence.seqlen_q; m_block += m_blocks) {
      // dQ lacks the share of keys that no CTA has.
      start_sums(params,
                 first_grad_q_block(params, sequence, work.batch, work.head, kTileM) + m_block,
                 keys < sequence.seqlen_k ? NAN : 0.f);
      prepare_queries(params, work, sequence, m_block * kTileM);
    }
  }

  // delta and the LSE of a tile of queries.
  CUTE_DEVICE static void prepare_queries(BackwardParams const& params, WorkTile const& work,
                                          Sequence const& sequence, int m_begin) {
    int const thread = int(threadIdx.x);
    int64_t const first = lse_offset(params, work, sequence);
    CUTE_UNROLL
    for (int i = thread / kRowThreads; i < kTileM; i += kThreads / kRowThreads) {
      int const query = m_begin + i;
      bool const inside = query < sequence.seqlen_q;
      float sum =
          inside ? part_of_row(params, work, sequence.row_q + query, thread % kRowThreads) : 0.f;
      CUTE_UNROLL
      for (int offset = kRowThreads / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
      if (inside && thread % kRowThreads == 0) {
        float const grad_lse = params.grad_lse == nullptr ? 0.f : params.grad_lse[first + query];
        // A query without keys has no gradient, whatever its LSE's is, and no probabilities:
        // exp2(-inf - inf) is 0, where -inf + inf would be NaN. A NaN is no such LSE.
        float const lse_log2 = params.lse[first + query] * float(M_LOG2E);
        bool const sees_none = lse_log2 < kLowestLseLog2;
        params.delta[first + query] = sees_none ? 0.f : grad_lse - sum;
        params.delta[lse_size(params) + first + query] = sees_none ? INFINITY : lse_log2;
      }
    }
  }

  // Of all packed gradients, those after the last sequence.
  CUTE_DEVICE static void clear_unused_rows(BackwardParams const& params) {
    GridWarp const warp = grid_warp(blockIdx.x, gridDim.x, threadIdx.x, kThreads);
    int64_t const first_q = params.cu_seqlens_q[params.batch];
    int64_t const first_k = params.cu_seqlens_k[params.batch];
    fill_rows(static_cast<Element*>(params.grad_q), params.grad_q_stride, first_q, params.total_q,
              params.heads, params.head_dim, warp, kZeros);
    fill_rows(static_cast<Element*>(params.grad_k), params.grad_k_stride, first_k, params.total_k,
              params.heads_kv, params.head_dim, warp, kZeros);
    fill_rows(static_cast<Element*>(params.grad_v), params.grad_v_stride, first_k, params.total_k,
              params.heads_kv, params.head_dim_v, warp, kZeros);
  }

  // Keys of the sequence from `first` on, which no CTA of the backward kernel has: dK and dV NaN.
  // Of the query heads that share a kv head the first writes them.
  CUTE_DEVICE static void mark_keys_without_tile(BackwardParams const& params, WorkTile const& work,
                                                 Sequence const& sequence, int first) {
    int const group = params.heads / params.heads_kv;
    if (work.head % group != 0) {
      return;
    }
    int const head_kv = work.head / group;
    GridWarp const warp = head_warp(params, work, kTileM, kThreads);
    int64_t const begin = sequence.row_k + first, end = sequence.row_k + sequence.seqlen_k;
    fill_rows(static_cast<Element*>(params.grad_k) + head_kv * params.grad_k_stride.head,
              params.grad_k_stride, begin, end, 1, params.head_dim, warp, kNaNs);
    fill_rows(static_cast<Element*>(params.grad_v) + head_kv * params.grad_v_stride.head,
              params.grad_v_stride, begin, end, 1, params.head_dim_v, warp, kNaNs);
  }

  CUTE_DEVICE static void start_sums(BackwardParams const& params, int64_t block, float value) {
    int const thread = int(threadIdx.x);
    auto* sums = reinterpret_cast<float4*>(params.grad_q_sum + block * (kTileM * kHeadDim));
    CUTE_UNROLL
    for (int i = thread; i < kTileM * kHeadDim / 4; i += kThreads) {
      sums[i] = make_float4(value, value, value, value);
    }
    if (params.grad_q_turn != nullptr && thread == 0) {
      params.grad_q_turn[block] = 0;
    }
  }

  // dO * O of every eighth vector of a row.
  CUTE_DEVICE static float part_of_row(BackwardParams const& params, WorkTile const& work,
                                       int64_t row, int lane) {
    auto const* o = static_cast<Element const*>(params.o) + work.batch * params.o_stride.batch +
                    work.head * params.o_stride.head + row * params.o_stride.row;
    auto const* grad_o = static_cast<Element const*>(params.grad_o) +
                         work.batch * params.grad_o_stride.batch +
                         work.head * params.grad_o_stride.head + row * params.grad_o_stride.row;
    float sum = 0.f;
    CUTE_UNROLL
    for (int d = lane * kVector; d < Traits::kHeadDimV; d += kRowThreads * kVector) {
      if (d < params.head_dim_v) {
        Vector const a = *reinterpret_cast<Vector const*>(o + d);
        Vector const b = *reinterpret_cast<Vector const*>(grad_o + d);
        CUTE_UNROLL
        for (int i = 0; i < kVector; ++i) {
          sum += float(a[i]) * float(b[i]);
        }
      }
    }
    return sum;
  }
};

}  // namespace cute_attention
