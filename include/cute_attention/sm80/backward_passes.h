// sm80/backward_passes.h: what runs before and after the backward kernel, a CTA for each tile of
// queries of each head.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/online_softmax.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm80/backward_operand.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/copy.h"
#include "cute_attention/sm80/global_sum.h"

namespace cute_attention::sm80 {

// Rows [first, total) of a packed gradient, which belong to no sequence, become zeros. Each warp
// clears its share.
//   gradient  [total, heads, cols]
template <class Element>
CUTE_DEVICE void clear_rows(Element* gradient, Strides const& stride, int64_t first, int64_t total,
                            int heads, int cols, GridWarp const& warp) {
  for (int64_t row = first + warp.index; row < total; row += warp.count) {
    for (int head = 0; head < heads; ++head) {
      clear_row(gradient + row * stride.row + head * stride.head, cols);
    }
  }
}

// Before: delta = dLSE - rowsum(dO * O), the LSE in units of log2(e), zeros for the sums of dQ and
// their turns, and for rows of no sequence.
template <class Row>
struct BackwardPrepare {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kRowThreads = 8;  // neighbours that share a row: 128 bytes a load
  using Vector = cutlass::AlignedArray<Element, kVector>;

  CUTE_DEVICE static void run(BackwardParams const& params, WorkTile const& work) {
    if (params.cu_seqlens_q != nullptr) {
      clear_unused_rows(params);
    }
    Sequence const sequence = load_sequence(params, work.batch);
    int const thread = int(threadIdx.x);
    int const m_begin = work.m_block * kTileM;
    if (m_begin >= sequence.seqlen_q) {
      return;  // a shorter sequence than the grid was made for
    }
    clear_sums(params,
               first_grad_q_block(params, sequence, work.batch, work.head, kTileM) + work.m_block,
               thread);
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
        // exp2(-inf - inf) is 0, where -inf + inf would be NaN.
        float const lse = params.lse[first + query];
        bool const sees_keys = lse != -INFINITY;
        params.delta[first + query] = sees_keys ? grad_lse - sum : 0.f;
        params.delta[lse_size(params) + first + query] =
            sees_keys ? lse * float(M_LOG2E) : INFINITY;
      }
    }
  }

  // Of all packed gradients, those after the last sequence.
  CUTE_DEVICE static void clear_unused_rows(BackwardParams const& params) {
    GridWarp const warp = grid_warp(blockIdx.x, gridDim.x, threadIdx.x, kThreads);
    int64_t const first_q = params.cu_seqlens_q[params.batch];
    int64_t const first_k = params.cu_seqlens_k[params.batch];
    clear_rows(static_cast<Element*>(params.grad_q), params.grad_q_stride, first_q, params.total_q,
               params.heads, params.head_dim, warp);
    clear_rows(static_cast<Element*>(params.grad_k), params.grad_k_stride, first_k, params.total_k,
               params.heads_kv, params.head_dim, warp);
    clear_rows(static_cast<Element*>(params.grad_v), params.grad_v_stride, first_k, params.total_k,
               params.heads_kv, params.head_dim_v, warp);
  }

  CUTE_DEVICE static void clear_sums(BackwardParams const& params, int64_t block, int thread) {
    auto* sums = reinterpret_cast<float4*>(params.grad_q_sum + block * (kTileM * kHeadDim));
    CUTE_UNROLL
    for (int i = thread; i < kTileM * kHeadDim / 4; i += kThreads) {
      sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
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

// After: dQ from its sums, scaled and rounded.
template <class Row>
struct BackwardFinish {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kHeadDim = Traits::kHeadDim;

  CUTE_DEVICE static void run(BackwardParams const& params, Element* smem, WorkTile const& work) {
    using namespace cute;
    Sequence const sequence = load_sequence(params, work.batch);
    int const thread = int(threadIdx.x);
    int const m_begin = work.m_block * kTileM;
    if (m_begin >= sequence.seqlen_q) {
      return;
    }
    typename Traits::TiledMmaQ mma;
    auto tQrQ =
        partition_fragment_C(mma, Shape<Int<kTileM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
    int64_t const block =
        first_grad_q_block(params, sequence, work.batch, work.head, kTileM) + work.m_block;
    load_fragment<Traits::kThreads>(params.grad_q_sum + block * (kTileM * kHeadDim), tQrQ, thread);
    CUTE_UNROLL
    for (int i = 0; i < size(tQrQ); ++i) {
      tQrQ(i) *= params.scale;
    }
    Tensor sQ = make_tensor(make_smem_ptr(smem), typename Traits::SmemLayoutQ{});  // (M, D)
    Tensor rQ16 = convert<Element>(tQrQ);  // (MMA, MMA_M, MMA_D)
    typename BackwardOperands<Traits>::PlaceOfGradQ(smem, thread).store(rQ16);
    __syncthreads();
    auto* q = static_cast<Element*>(params.grad_q) + work.batch * params.grad_q_stride.batch +
              work.head * params.grad_q_stride.head +
              (sequence.row_q + m_begin) * params.grad_q_stride.row;
    store_tile(typename Traits::GmemStoreQK{}, sQ,
               gmem_tile<kTileM, kHeadDim>(q, params.grad_q_stride.row),
               sequence.seqlen_q - m_begin, params.head_dim, thread);
  }
};

}  // namespace cute_attention::sm80
