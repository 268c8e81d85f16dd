// sm80/forward_bias.h: the tile of a bias of the forward kernel, in shared memory. It has one
// buffer, and is copied with K.
#pragma once

#include "cute_attention/core/opaque.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm80/forward_traits.h"

namespace cute_attention::sm80 {

template <class Traits>
struct ForwardBias {
  // Starts the copies of the tile beside the keys from `n_begin` on, if it goes through shared
  // memory. The copies of K then complete the group.
  template <class Buffer>
  CUTE_DEVICE static void load(ForwardParams const& params, WorkTile const& work,
                               Sequence const& sequence, int m_begin, int n_begin, Buffer& buffer,
                               int thread) {
    if (has_bias_tiles<Traits::kKey.score_mods>(params, sequence)) {
      typename Traits::Bias(buffer.data())
          .template load<Traits::kThreads>(
              bias_of_head(params, opaque(work.batch), opaque(work.head)), params.bias.row_stride,
              sequence, opaque(m_begin), n_begin, opaque(thread));
    }
  }

  // Adds the tile to the scores beside it.
  //   unit  of the scores (score_mod.h)
  //   tSrS  (MMA, MMA_M, MMA_N)
  template <class Buffer, class Scores>
  CUTE_DEVICE static void add(float unit, Buffer const& buffer, int thread, Scores& tSrS) {
    typename Traits::Bias(buffer.data())
        .template add<typename Traits::TiledMma, false>(tSrS, 1.f / unit, opaque(thread));
  }
};

}  // namespace cute_attention::sm80
