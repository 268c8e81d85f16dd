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

// Writes the rows of dK or dV of the 64 keys of a warpgroup.
//   gradient  of the first head of the first sequence, and its strides; cols, how many there are
//   thread    of the warpgroup
//   rC        (MMA, MMA_N, MMA_COLS)  the accumulator
template <class Traits, class Accumulator>
CUTE_DEVICE void store_rows_of_keys(BackwardWork const& work, void* gradient,
                                    Strides const& strides, int32_t cols, int warpgroup, int thread,
                                    Accumulator const& rC) {
  using Element = typename Traits::Element;
  int const first = work.tile.n_block * Traits::kTileN + warpgroup * kWarpgroupM;
  store_rows(rC,
             row_pointer(static_cast<Element*>(gradient), strides, work.tile.batch,
                         work.tile.head_kv, work.sequence.row_k + first),
             strides.row, work.sequence.seqlen_k - first, cols, thread);
}

// Writes dK of the 64 keys of a warpgroup, scaled.
//   tdKrdK  (MMA, MMA_N, MMA_D)
template <class Traits, class GradK>
CUTE_DEVICE void store_grad_keys(BackwardParams const& params, BackwardWork const& work,
                                 int warpgroup, int thread, GradK& tdKrdK) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(tdKrdK); ++i) {
    tdKrdK(i) *= grad_qk_scale(params);
  }
  store_rows_of_keys<Traits>(work, params.grad_k, params.grad_k_stride, params.head_dim, warpgroup,
                             thread, tdKrdK);
}

// Writes dV of the 64 keys of a warpgroup, scaled.
//   tdVrdV  (MMA, MMA_N, MMA_DV)
template <class Traits, class GradV>
CUTE_DEVICE void store_grad_values(BackwardParams const& params, BackwardWork const& work,
                                   int warpgroup, int thread, GradV& tdVrdV) {
  if constexpr (has_dropout(Traits::kKey.score_mods)) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(tdVrdV); ++i) {
      tdVrdV(i) *= grad_v_scale(params);
    }
  }
  store_rows_of_keys<Traits>(work, params.grad_v, params.grad_v_stride, params.head_dim_v,
                             warpgroup, thread, tdVrdV);
}

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
