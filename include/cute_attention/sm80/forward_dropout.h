// sm80/forward_dropout.h: dropout in the forward kernel: clears the probabilities of a tile that
// are dropped, when they are rounded to 16 bits.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention::sm80 {

// Of rows without dropout: nothing.
template <class Traits, bool kDrops = has_dropout(Traits::kKey.score_mods)>
struct ForwardDropout {
  CUTE_DEVICE ForwardDropout(ForwardParams const&, WorkTile const&, int, int) {}
  template <class Probabilities, class Tile>
  CUTE_DEVICE void drop(ForwardParams const&, Probabilities&, Tile const&) const {}
  template <class Factors>
  CUTE_DEVICE static void scale(ForwardParams const&, Factors&) {}
};

template <class Traits>
struct ForwardDropout<Traits, true> {
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kBlocksM = kTileM / Traits::kWarpsM / 16;  // of 16 rows of a warp

  DropoutRow rows[kBlocksM];  // the random words of the thread's queries, if the call drops

  CUTE_DEVICE ForwardDropout(ForwardParams const& params, WorkTile const& work, int m_begin,
                             int thread) {
    using namespace cute;
    if (!is_in(params)) {
      return;
    }
    Tensor tScS =  // (MMA, MMA_M, MMA_N)
        typename Traits::TiledMma{}.get_slice(thread).partition_C(
            make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
    Tensor cS = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));  // (ROWS, COLS)
    CUTE_STATIC_ASSERT_V(size<0>(cS) == Int<2 * kBlocksM>{});
    CUTE_UNROLL
    for (int m = 0; m < kBlocksM; ++m) {
      rows[m] = dropout_row(*params.dropout.seed, uint32_t(work.batch * params.heads + work.head),
                            uint32_t(m_begin + int(get<0>(cS(2 * m, 0)))));
    }
  }

  //   rP            (MMA, MMA_M, MMA_N)  probabilities in 16 bits
  //   score_tile()  describes their scores (score_tile.h)
  template <class Probabilities, class ScoreTileOf>
  CUTE_DEVICE void drop(ForwardParams const& params, Probabilities& rP,
                        ScoreTileOf const& score_tile) const {
    using namespace cute;
    if (!is_in(params)) {
      return;
    }
    Tensor blocks = make_tensor(rP.data(), as_a_operand(rP.layout()));  // (MMA, MMA_M, MMA_N / 2)
    auto const tile = score_tile();
    KeepTest const test(uint32_t(params.dropout.drop_count));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(blocks); ++k) {
      CUTE_UNROLL
      for (int m = 0; m < kBlocksM; ++m) {
        kept_block(tile, test, rows[m], k).drop(blocks(_, m, k));
      }
    }
  }

  // Multiplies the factors of the rows of O, (ROWS), by what dropout multiplies by.
  template <class Factors>
  CUTE_DEVICE static void scale(ForwardParams const& params, Factors& factors) {
    CUTE_UNROLL
    for (int row = 0; row < cute::size(factors); ++row) {
      factors(row) *= keep_scale(params.dropout);
    }
  }

 private:
  CUTE_DEVICE static bool is_in(ForwardParams const& params) {
    return call_has<Traits::kKey.score_mods, score_mods::Dropout>(params);
  }
};

}  // namespace cute_attention::sm80
