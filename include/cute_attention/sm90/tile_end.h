// sm90/tile_end.h: how a tile of queries ends for a consumer warpgroup: the softmax of its rows,
// and the store of their O.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/row_softmax.h"
#include "cute_attention/sm90/forward_store.h"

namespace cute_attention::sm90 {

// What the softmax of a tile's rows ends with.
template <class Rows>
struct SoftmaxEnd {
  Rows factors;  // (ROWS) normalise O; of a split, the sums of its rows
  Rows lse;      // (ROWS) of a split, the bases of its rows
  bool is_split;
};

// O of a thread, (ROWS, COLS), of its accumulator (MMA, MMA_M, MMA_DV).
template <class Softmax, class Accumulator>
CUTE_DEVICE auto rows_of_output(Accumulator& tOrO) {
  using namespace cute;
  Tensor rO = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));  // (ROWS, COLS)
  CUTE_STATIC_ASSERT_V(size<0>(rO) == size(typename Softmax::Rows{}));
  return rO;
}

// Ends the softmax of a warpgroup's 64 rows, from row `m_offset` of the tile on, and joins their
// sinks; of a split, that is left to whoever combines it. It needs no O: called while the tensor
// cores compute the last one, it takes no time of its own.
template <class Row, class Softmax>
CUTE_DEVICE SoftmaxEnd<typename Softmax::Rows> end_softmax(ForwardArguments const& arguments,
                                                           ForwardTile const& tile,
                                                           int32_t m_offset, int thread,
                                                           Softmax const& softmax, bool is_split) {
  if (is_split) {
    return {softmax.sums(), softmax.bases(), true};
  }
  SoftmaxEnd<typename Softmax::Rows> end;
  end.is_split = false;
  end.factors = softmax.finish(end.lse);
  join_sinks(arguments.params, heads_of_thread(arguments, tile, m_offset, thread), end.factors,
             end.lse);
  if constexpr (has_dropout(Row::kKey.score_mods)) {
    CUTE_UNROLL
    for (int row = 0; row < cute::size(end.factors); ++row) {
      end.factors(row) *= keep_scale(arguments.params.dropout);
    }
  }
  return end;
}

// Normalises and stores a warpgroup's 64 rows, from row `m_offset` of the tile on; of a split, what
// it has of them.
//   rO         (ROWS, COLS)
//   first_col  as in store_tile()
template <class Row, class Output, class Rows>
CUTE_DEVICE void end_tile(ForwardArguments const& arguments, ForwardTile const& tile,
                          int32_t m_offset, int thread, Output& rO, SoftmaxEnd<Rows> const& end,
                          int32_t first_col = 0) {
  if (end.is_split) {
    store_split(arguments, tile, m_offset, thread, rO, end.factors, end.lse, first_col);
    return;
  }
  scale_rows(rO, end.factors);
  store_tile<ElementOf<Row::kKey.dtype>>(arguments, tile, m_offset, thread, rO, end.lse, first_col);
}

}  // namespace cute_attention::sm90
