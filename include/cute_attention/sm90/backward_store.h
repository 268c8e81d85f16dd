// sm90/backward_store.h: gradients on their way from the accumulators of a warpgroup to global
// memory.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

// Writes dK and dV of the 64 keys of a warpgroup, scaled.
//   thread  of the warpgroup
//   tdKrdK  (MMA, MMA_N, MMA_D)    tdVrdV  (MMA, MMA_N, MMA_DV)
template <class Traits, class GradK, class GradV>
CUTE_DEVICE void store_key_gradients(BackwardParams const& params, BackwardWork const& work,
                                     int warpgroup, int thread, GradK& tdKrdK, GradV& tdVrdV) {
  using namespace cute;
  using Element = typename Traits::Element;
  Tensor rdK = make_tensor(tdKrdK.data(), rows_and_columns(tdKrdK.layout()));  // (ROWS, COLS)
  Tensor rdV = make_tensor(tdVrdV.data(), rows_and_columns(tdVrdV.layout()));  // (ROWS, COLS)
  CUTE_UNROLL
  for (int i = 0; i < size(rdK); ++i) {
    rdK(i) *= grad_qk_scale(params);
  }
  if constexpr (has_dropout(Traits::kKey.score_mods)) {
    CUTE_UNROLL
    for (int i = 0; i < size(rdV); ++i) {
      rdV(i) *= grad_v_scale(params);
    }
  }
  int const first =
      work.tile.n_block * Traits::kTileN + warpgroup * kWarpgroupM + row_of_thread(thread);
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    int const key = first + 8 * row;
    bool const inside = key < work.sequence.seqlen_k;
    store_row(rdK(row, _),
              row_pointer(static_cast<Element*>(params.grad_k), params.grad_k_stride,
                          work.tile.batch, work.tile.head_kv, work.sequence.row_k + key),
              inside, params.head_dim, thread);
    store_row(rdV(row, _),
              row_pointer(static_cast<Element*>(params.grad_v), params.grad_v_stride,
                          work.tile.batch, work.tile.head_kv, work.sequence.row_k + key),
              inside, params.head_dim_v, thread);
  }
}

// Writes a warpgroup's part of dQ of a step, scaled, where no other block of keys adds to it.
//   thread  of the warpgroup
//   tdQrdQ  (MMA, MMA_M, MMA_D)
template <class Traits, class GradQ>
CUTE_DEVICE void store_grad_queries(BackwardParams const& params, BackwardWork const& work,
                                    StepTile const& tile, int warpgroup, int thread,
                                    GradQ& tdQrdQ) {
  using Element = typename Traits::Element;
  int const query = tile.m_block * Traits::kTileM + Traits::row_part_q(warpgroup) * kWarpgroupM;
  int const col = Traits::col_part_q(warpgroup) * Traits::kColsQ;
  CUTE_UNROLL
  for (int i = 0; i < cute::size(tdQrdQ); ++i) {
    tdQrdQ(i) *= grad_qk_scale(params);
  }
  store_rows(tdQrdQ,
             row_pointer(static_cast<Element*>(params.grad_q), params.grad_q_stride,
                         work.tile.batch, tile.head, work.sequence.row_q + query) +
                 col,
             params.grad_q_stride.row, work.sequence.seqlen_q - query, params.head_dim - col,
             thread);
}

}  // namespace cute_attention::sm90
