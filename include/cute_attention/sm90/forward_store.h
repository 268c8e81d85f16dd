// sm90/forward_store.h: O and the LSE from registers to global memory.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/sink.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

// Where a row of a tile is stored in global memory.
template <class Element>
struct StoreRow {
  bool inside;  // it is a query's
  int32_t head;
  Element* o;
  float* lse;  // or null

  // Row `row` of the tile.
  CUTE_DEVICE StoreRow(ForwardArguments const& arguments, ForwardTile const& tile, int32_t row) {
    ForwardParams const& params = arguments.params;
    int32_t const query = tile.m_begin + arguments.packing.query(row);
    int32_t const head_of_tile = arguments.packing.head(row);
    inside = query < tile.sequence.seqlen_q && head_of_tile < tile.heads;
    head = tile.work.head + head_of_tile;
    int32_t const batch = tile.work.batch;
    o = row_pointer(static_cast<Element*>(params.o), params.o_stride, batch, head,
                    tile.sequence.row_q + query);
    lse = params.lse == nullptr ? nullptr
                                : params.lse + lse_index(params, tile.sequence, batch, head, query);
  }
};

// The heads of this thread's two rows, for join_sinks(). A row without a head has that of another.
CUTE_DEVICE auto heads_of_thread(ForwardArguments const& arguments, ForwardTile const& tile,
                                 int32_t m_offset, int thread) {
  return [&arguments, &tile, first = m_offset + row_of_thread(thread)](int row) {
    int32_t const head_of_tile = arguments.packing.head(first + 8 * row);
    return tile.work.head + min_of(head_of_tile, tile.heads - 1);
  };
}

// Stores a warpgroup's 64 rows, from row `m_offset` of the tile on.
//   rO    (2, DV columns of a thread)  normalised
//   rLse  (2)
template <class Element, class Output, class Rows>
CUTE_DEVICE void store_tile(ForwardArguments const& arguments, ForwardTile const& tile,
                            int32_t m_offset, int thread, Output const& rO, Rows const& rLse) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(rO) == Int<2>{});
  CUTE_STATIC_ASSERT_V(size(rLse) == size<0>(rO));
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    StoreRow<Element> const target(arguments, tile, m_offset + row_of_thread(thread) + 8 * row);
    store_row(rO(row, _), target.o, target.inside, arguments.params.head_dim_v, thread);
    if (target.lse != nullptr && target.inside && thread % kThreadsPerRow == 0) {
      *target.lse = rLse(row);
    }
  }
}

// Stores a warpgroup's 64 rows of a tile whose queries see no key: zeros, and the LSE of
// the sink alone.
template <class Element>
CUTE_DEVICE void store_empty(ForwardArguments const& arguments, ForwardTile const& tile,
                             int32_t m_offset, int thread) {
  int const t = thread % kThreadsPerRow;
  for (int row = 0; row < 2; ++row) {
    StoreRow<Element> const target(arguments, tile, m_offset + row_of_thread(thread) + 8 * row);
    if (!target.inside) {
      continue;
    }
    for (int col = 8 * t; col < arguments.params.head_dim_v; col += 8 * kThreadsPerRow) {
      *reinterpret_cast<uint4*>(target.o + col) = uint4{};
    }
    if (target.lse != nullptr && t == 0) {
      *target.lse = empty_lse(arguments.params, target.head);
    }
  }
}

}  // namespace cute_attention::sm90
