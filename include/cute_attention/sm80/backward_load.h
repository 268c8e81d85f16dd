// sm80/backward_load.h: the copies of the backward kernel from global to shared memory.
#pragma once

#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/copy.h"

namespace cute_attention::sm80 {

template <class Traits>
struct BackwardLoad {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  BackwardParams const& params;
  SharedMemory& shared;
  // A copy: as a reference to another member of the kernel it would keep the compiler from holding
  // the kernel's members in registers.
  Sequence const sequence;
  int const batch;
  int const thread;
  // The LSE for the threads that copy it, delta for all others: a thread copies one number a step.
  float const* const lse_or_delta;

  CUTE_DEVICE BackwardLoad(BackwardParams const& params, SharedMemory& shared,
                           Sequence const& sequence, int batch, int thread)
      : params(params),
        shared(shared),
        sequence(sequence),
        batch(batch),
        thread(thread),
        lse_or_delta(params.delta + opaque(thread < kTileM ? numbers_size<false>(params) : 0)) {}

  // Starts the copies of K and V of the block of keys that begins at n_begin. Rows past the end of
  // the sequence become zeros.
  CUTE_DEVICE void keys(GradTile const& tile, int n_begin) const {
    using namespace cute;
    int64_t const row = sequence.row_k + n_begin;
    load_tile<true>(
        typename Traits::GmemCopyQK{},
        head_tile<kTileN, Traits::kHeadDim>(static_cast<Element const*>(params.k), params.k_stride,
                                            tile.batch, tile.head_kv, row),
        make_tensor(make_smem_ptr(shared.k.data()), typename Traits::SmemLayoutK{}),  // (N, D)
        sequence.seqlen_k - n_begin, params.head_dim, thread);
    load_tile<true>(
        typename Traits::GmemCopyV{},
        head_tile<kTileN, Traits::kHeadDimV>(static_cast<Element const*>(params.v), params.v_stride,
                                             tile.batch, tile.head_kv, row),
        make_tensor(make_smem_ptr(shared.v.data()), typename Traits::SmemLayoutV{}),  // (N, DV)
        sequence.seqlen_k - n_begin, params.head_dim_v, thread);
  }

  // Starts the copies of Q, dO, LSE and delta of a step. Rows past the end of the sequence become
  // zeros; the kernel masks their scores.
  CUTE_DEVICE void queries(BackwardStep<Element> const& step, int stage) const {
    using namespace cute;
    int const rows = sequence.seqlen_q - step.m_block * kTileM;
    load_tile<true>(typename Traits::GmemCopyQK{},
                    gmem_tile<kTileM, Traits::kHeadDim>(step.q, params.q_stride.row),
                    make_tensor(make_smem_ptr(shared.q[stage].data()),  // (M, D)
                                typename Traits::SmemLayoutQ{}),
                    rows, params.head_dim, thread_in_loop());
    load_tile<true>(typename Traits::GmemCopyV{},
                    gmem_tile<kTileM, Traits::kHeadDimV>(step.grad_o, params.grad_o_stride.row),
                    make_tensor(make_smem_ptr(shared.grad_o[stage].data()),  // (M, DV)
                                typename Traits::SmemLayoutGradO{}),
                    rows, params.head_dim_v, thread_in_loop());
    int const query = opaque(thread) % kTileM;
    if (thread < 2 * kTileM) {
      bool const inside = query < rows;
      float const* source = lse_or_delta + step.row;
      float* target = thread < kTileM ? shared.lse[stage] : shared.delta[stage];
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(source[inside ? query : 0], target[query],
                                                   inside);
    }
    if constexpr (has_dropout(Traits::kKey.score_mods)) {
      auto& dropout = shared.dropout[stage];
      if (thread < dropout.kWriters &&
          call_has<Traits::kKey.score_mods, score_mods::Dropout>(params)) {
        dropout.write(params, batch, step.head, step.m_block * kTileM, thread);
      }
    }
    cp_async_fence();
  }

 private:
  // The thread's index as the compiler must not know it: inside the loop over steps it then
  // computes addresses from the index anew, and holds no registers for them.
  CUTE_DEVICE uint32_t thread_in_loop() const { return uint32_t(opaque(thread)); }
};

}  // namespace cute_attention::sm80
