// sm80/backward_bias.h: the tile of a bias of a step of the backward kernel, in shared memory.
//
// There is no room of its own for it: it lies where P of the step will. So it is copied when all
// warps have read P of the last step, while dQ of that step and S^T of its own are computed; and no
// warp writes P before all have added the bias to their scores. That takes a barrier behind the
// last product with P, and one behind S^T.
//
// Rows that add it to copies of scores (kModifiesCopies of core/backward_scores.h) do so while they
// write P. There it has a buffer of its own, and no barrier is added.
#pragma once

#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/bias_tile.h"

namespace cute_attention::sm80 {

template <class Traits>
struct BackwardBias {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  using Tile = BiasTile<Element, SmemTile<kTileM, kTileN>, kSwizzleCols<kTileN>>;
  static_assert(Traits::kHasBiasBuffer ||
                    (Traits::kWarpsM > 1 &&
                     cute::cosize_v<typename Traits::SmemLayoutP> == kTileM * kTileN),
                "P has room for the tile");

  // Starts the copies of the tile of a step, if it goes through shared memory.
  template <class SharedMemory>
  CUTE_DEVICE static void load(BackwardParams const& params, Sequence const& sequence,
                               int32_t batch, BackwardStep<Element> const& step, int n_begin,
                               SharedMemory& shared, int thread) {
    if (has_bias_tiles<Traits::kKey.score_mods>(params, sequence)) {
      tile(shared).template load<Traits::kThreads>(bias_of_head(params, batch, step.head),
                                                   params.bias.row_stride, sequence,
                                                   step.m_block * kTileM, n_begin, thread);
    }
    cute::cp_async_fence();
  }

  // Adds the tile to the scores of its step.
  //   unit  of the scores (score_mod.h)
  //   tSrS  (MMA, MMA_N, MMA_M)  S^T
  template <class ScoresT, class SharedMemory>
  CUTE_DEVICE static void add(float unit, SharedMemory const& shared, int thread, ScoresT& tSrS) {
    tile(shared).template add<typename Traits::TiledMmaS, true>(tSrS, 1.f / unit, thread);
  }

  // Adds what lies beside block `k` of 16 queries to a copy of their scores.
  //   copies  (MMA, MMA_N, 2)
  template <class Copies, class SharedMemory>
  CUTE_DEVICE static void add_to_copies(float unit, SharedMemory const& shared, int thread, int k,
                                        Copies& copies) {
    tile(shared).template add_to_copies<typename Traits::TiledMmaS, true>(2 * k, copies, 1.f / unit,
                                                                          thread);
  }

 private:
  template <class SharedMemory>
  CUTE_DEVICE static Tile tile(SharedMemory const& shared) {
    if constexpr (Traits::kHasBiasBuffer) {
      return Tile(shared.bias.data());
    } else {
      return Tile(shared.p.data());
    }
  }
};

}  // namespace cute_attention::sm80
