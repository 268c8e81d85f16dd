// sm80/backward_store.h: the end of the backward kernel: dK and dV of a block of keys go from
// accumulators through shared memory to global memory.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/sm80/backward_operand.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/copy.h"

namespace cute_attention::sm80 {

// Scales and rounds dK and dV, and writes both in whole 16-byte vectors. In shared memory dK takes
// the place of K and dV that of V.
//   tdKrdK  (MMA, MMA_N, MMA_D)    tdVrdV  (MMA, MMA_N, MMA_DV)
template <class Traits, class GradK, class GradV>
CUTE_DEVICE void store_key_gradients(BackwardParams const& params,
                                     typename Traits::SharedMemory& shared, GradTile const& tile,
                                     Sequence const& sequence, int thread, GradK& tdKrdK,
                                     GradV& tdVrdV) {
  using namespace cute;
  using Element = typename Traits::Element;
  using Operands = BackwardOperands<Traits>;
  constexpr int kTileN = Traits::kTileN;
  int const n_begin = tile.n_block * kTileN;
  CUTE_UNROLL
  for (int i = 0; i < size(tdKrdK); ++i) {
    tdKrdK(i) *= grad_qk_scale(params);
  }
  if constexpr (has_dropout(Traits::kKey.score_mods)) {
    CUTE_UNROLL
    for (int i = 0; i < size(tdVrdV); ++i) {
      tdVrdV(i) *= grad_v_scale(params);
    }
  }
  Tensor sdK =  // (N, D)
      make_tensor(make_smem_ptr(shared.k.data()), typename Traits::SmemLayoutK{});
  Tensor sdV =  // (N, DV)
      make_tensor(make_smem_ptr(shared.v.data()), typename Traits::SmemLayoutV{});
  Tensor rdK16 = convert<Element>(tdKrdK);  // (MMA, MMA_N, MMA_D)
  Tensor rdV16 = convert<Element>(tdVrdV);  // (MMA, MMA_N, MMA_DV)
  CUTE_STATIC_ASSERT_V(size(rdK16) * Int<Traits::kThreads>{} == size(sdK));
  CUTE_STATIC_ASSERT_V(size(rdV16) * Int<Traits::kThreads>{} == size(sdV));
  __syncthreads();  // all threads are done with K and V
  typename Operands::PlaceOfGradK(shared.k.data(), thread).store(rdK16);
  typename Operands::PlaceOfGradV(shared.v.data(), thread).store(rdV16);
  __syncthreads();  // all threads have written their parts of dK and dV
  int64_t const row = sequence.row_k + n_begin;
  store_tile(
      typename Traits::GmemStoreQK{}, sdK,
      head_tile<kTileN, Traits::kHeadDim>(static_cast<Element*>(params.grad_k),
                                          params.grad_k_stride, tile.batch, tile.head_kv, row),
      sequence.seqlen_k - n_begin, params.head_dim, thread);
  store_tile(
      typename Traits::GmemStoreV{}, sdV,
      head_tile<kTileN, Traits::kHeadDimV>(static_cast<Element*>(params.grad_v),
                                           params.grad_v_stride, tile.batch, tile.head_kv, row),
      sequence.seqlen_k - n_begin, params.head_dim_v, thread);
}

}  // namespace cute_attention::sm80
