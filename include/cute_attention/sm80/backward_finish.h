// sm80/backward_finish.h: the kernel that runs after the backward kernel: it writes dQ from its
// sums, scaled and rounded, and the gradient of the sinks; and dK and dV of blocks of keys that
// were computed in parts.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_passes.h"
#include "cute_attention/core/global_sum.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/sm80/backward_operand.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/copy.h"

namespace cute_attention::sm80 {

template <class Row>
struct BackwardFinish {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kHeadDim = Traits::kHeadDim;

  using Sums = KeyGradientSums<Traits, Traits::kThreads>;

  CUTE_DEVICE static void run(BackwardParams const& params, PartSums const& sums, Element* smem) {
    if (int(blockIdx.x) < sums.ctas) {
      Sums::add_up(params, sums.schedule, int(blockIdx.x));
      return;
    }
    WorkTile const work = last_first(params, kTileM);
    finish_backward<kTileM, Traits::kThreads, false>(
        params, work, reinterpret_cast<float*>(smem), [&](Sequence const& sequence, int m_block) {
          finish_queries(params, smem, work, sequence, m_block);
          __syncthreads();  // all threads are done with shared memory
        });
  }

  // Writes dQ of a tile of queries.
  CUTE_DEVICE static void finish_queries(BackwardParams const& params, Element* smem,
                                         WorkTile const& work, Sequence const& sequence,
                                         int m_block) {
    using namespace cute;
    int const thread = int(threadIdx.x);
    int const m_begin = m_block * kTileM;
    typename Traits::TiledMmaQ mma;
    auto tdQrdQ =
        partition_fragment_C(mma, Shape<Int<kTileM>, Int<kHeadDim>>{});  // (MMA, MMA_M, MMA_D)
    CUTE_STATIC_ASSERT_V(size(tdQrdQ) * Int<Traits::kThreads>{} == Int<kTileM * kHeadDim>{});
    int64_t const block =
        first_grad_q_block(params, sequence, work.batch, work.head, kTileM) + m_block;
    load_fragment<Traits::kThreads>(params.grad_q_sum + block * (kTileM * kHeadDim), tdQrdQ,
                                    thread);
    CUTE_UNROLL
    for (int i = 0; i < size(tdQrdQ); ++i) {
      tdQrdQ(i) *= grad_qk_scale(params);
    }
    Tensor sdQ = make_tensor(make_smem_ptr(smem), typename Traits::SmemLayoutQ{});  // (M, D)
    Tensor rdQ16 = convert<Element>(tdQrdQ);  // (MMA, MMA_M, MMA_D)
    typename BackwardOperands<Traits>::PlaceOfGradQ(smem, thread).store(rdQ16);
    __syncthreads();  // all threads have written their parts of dQ
    store_tile(
        typename Traits::GmemStoreQK{}, sdQ,
        head_tile<kTileM, kHeadDim>(static_cast<Element*>(params.grad_q), params.grad_q_stride,
                                    work.batch, work.head, sequence.row_q + m_begin),
        sequence.seqlen_q - m_begin, params.head_dim, thread);
  }
};

}  // namespace cute_attention::sm80
