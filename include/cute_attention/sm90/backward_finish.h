// sm90/backward_finish.h: the kernel that runs after the backward kernel: it writes dQ from its
// sums, scaled and rounded, and the gradient of the sinks; and dK and dV of blocks of keys that
// were computed in parts.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/backward_passes.h"
#include "cute_attention/core/global_sum.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/leftover_key.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/sm90/backward_states.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

//   kLeavesKey  whether the call has a leftover key (core/leftover_key.h)
template <class Row, bool kLeavesKey>
struct BackwardFinish {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kFinishThreads;
  using Sums = KeyGradientSums<Traits, kThreads>;
  using OfLeftoverKey =
      std::conditional_t<kLeavesKey, LeftoverKeyFinish<Traits, kThreads>, NoLeftoverKey>;

  CUTE_DEVICE static void run(BackwardParams const& params, PartSums const& sums,
                              int32_t const* sum_states, int32_t const* written, float* leftover,
                              float* smem) {
    int const cta = int(blockIdx.x);
    if (cta < sums.ctas) {
      Sums::add_up(params, sums.schedule, cta);
      return;
    }
    OfLeftoverKey const key{params, leftover};
    if constexpr (kLeavesKey) {
      if (cta < sums.ctas + params.batch * params.heads_kv) {
        key.write(cta - sums.ctas);
        return;
      }
    }
    WorkTile const work = last_first(params, kTileM);
    // If it also computes the gradient of a sink, which takes all threads, it writes dQ once more.
    if (is_written(params, work, written) && !writes_sink_gradient(params, work)) {
      return;
    }
    finish_backward<kTileM, kThreads, true>(
        params, work, smem, [&](Sequence const& sequence, int m_block) {
          finish_queries(params, work, sum_states, key, sequence, m_block);
        });
  }

  // Whether the thread's part of dQ of a tile of queries has been written (CompleteHeads).
  CUTE_DEVICE static bool is_written(BackwardParams const& params, WorkTile const& work,
                                     int32_t const* written) {
    if constexpr (Traits::kCountsHeads && !kLeavesKey) {
      int64_t const block =
          grad_q_blocks(params, kTileM).first(work.batch, work.head, 0) + work.m_block;
      int const part = int(threadIdx.x) / kWarpgroupThreads;
      return written != nullptr && written[block * Traits::kConsumers + part] != 0;
    }
    return false;
  }

  // Writes dQ of a tile of queries.
  CUTE_DEVICE static void finish_queries(BackwardParams const& params, WorkTile const& work,
                                         int32_t const* sum_states, OfLeftoverKey const& key,
                                         Sequence const& sequence, int m_block) {
    using namespace cute;
    int const thread = int(threadIdx.x) % kWarpgroupThreads;
    int const part = int(threadIdx.x) / kWarpgroupThreads;
    constexpr int kCols = Traits::kColsQ;
    auto tdQrdQ = partition_fragment_C(
        typename Traits::MmaQ{}, Shape<Int<kWarpgroupM>, Int<kCols>>{});  // (MMA, MMA_M, MMA_D)
    int64_t const block =
        first_grad_q_block(params, sequence, work.batch, work.head, kTileM) + m_block;
    float const* const sums = params.grad_q_sum + block * (kTileM * kHeadDim);
    if (Traits::kStoresFirst && sum_states != nullptr &&
        sum_states[block * Traits::kConsumers + part] == kSumNotBegun) {
      clear(tdQrdQ);  // queries that see no key
    } else {
      load_fragment<kWarpgroupThreads>(sums + part * (kWarpgroupM * kCols), tdQrdQ, thread);
    }
    Tensor rdQ = make_tensor(tdQrdQ.data(), rows_and_columns(tdQrdQ.layout()));  // (ROWS, COLS)
    int const first = m_block * kTileM + Traits::row_part_q(part) * kWarpgroupM;
    int const col = Traits::col_part_q(part) * kCols;
    if constexpr (kLeavesKey) {
      int const last = sequence.seqlen_q - 1;
      int const query = min_of(first + row_of_thread(thread), last);
      key.add(work, lse_index(params, sequence, work.batch, work.head, query),
              min_of(8, last - query), col + thread % kThreadsPerRow * 2, rdQ);
    }
    CUTE_UNROLL
    for (int i = 0; i < size(rdQ); ++i) {
      rdQ(i) *= grad_qk_scale(params);
    }
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      int const query = first + row_of_thread(thread) + 8 * row;
      store_row(rdQ(row, _),
                row_pointer(static_cast<Element*>(params.grad_q), params.grad_q_stride, work.batch,
                            work.head, sequence.row_q + query) +
                    col,
                query < sequence.seqlen_q, params.head_dim - col, thread);
    }
  }
};

}  // namespace cute_attention::sm90
