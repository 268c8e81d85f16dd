// sm90/row_numbers.h: what a thread that has scores S, and not S^T, needs to know of their queries,
// for kernels of the backward.
#pragma once

#include "cute_attention/core/call_features.h"
#include "cute_attention/core/dropout.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention::sm90 {

// Of the two rows of a warpgroup that a thread has parts of.
template <uint32_t kScoreMods>
struct RowNumbers {
  float lse[2];  // times log2(e)
  float delta[2];
  DropoutRow dropout_row{};  // unused without dropout

  // Loads them. A row past the end of the sequence sees no key.
  //   first_query  of the thread; the other one is 8 queries after it
  CUTE_DEVICE void load(BackwardParams const& params, Sequence const& sequence, int32_t batch,
                        int32_t head, int32_t first_query) {
    float const* const of_head =
        params.delta + number_index<true>(params, sequence, batch, head, 0);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      int const query = first_query + 8 * row;
      bool const inside = query < sequence.seqlen_q;
      lse[row] = inside ? of_head[numbers_size<true>(params) + query] : INFINITY;
      delta[row] = inside ? of_head[query] : 0.f;
    }
    if constexpr (has_dropout(kScoreMods)) {
      if (call_has<kScoreMods, score_mods::Dropout>(params)) {
        dropout_row = cute_attention::dropout_row(
            *params.dropout.seed, uint32_t(batch * params.heads + head), uint32_t(first_query));
      }
    }
  }

  // Clears what dropped probabilities give to dP.
  //   make_tile()  describes the scores (score_tile.h)
  //   tdPrdP       (MMA, MMA_M, MMA_N)  of the same scores
  template <class MakeTile, class Gradients>
  CUTE_DEVICE void drop(BackwardParams const& params, MakeTile const& make_tile,
                        Gradients& tdPrdP) const {
    if constexpr (has_dropout(kScoreMods)) {
      if (call_has<kScoreMods, score_mods::Dropout>(params)) {
        auto const kept = kept_blocks(make_tile(), params.dropout, dropout_row);
        CUTE_UNROLL
        for (int i = 0; i < cute::size(tdPrdP); ++i) {
          tdPrdP(i) = kept.keeps(i) ? tdPrdP(i) : 0.f;
        }
      }
    }
  }
};

}  // namespace cute_attention::sm90
