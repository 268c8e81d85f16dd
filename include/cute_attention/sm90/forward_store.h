// sm90/forward_store.h: O and the LSE from registers to global memory.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/key_splits.h"
#include "cute_attention/core/sink.h"
#include "cute_attention/element.h"
#include "cute_attention/sm90/last_split.h"
#include "cute_attention/sm90/row_store.h"
#include "cute_attention/sm90/tile_rows.h"

namespace cute_attention::sm90 {

// The heads of this thread's two rows, for join_sinks(). A row without a head has that of another.
CUTE_DEVICE auto heads_of_thread(ForwardArguments const& arguments, ForwardTile const& tile,
                                 int32_t m_offset, int thread) {
  return [&arguments, &tile, first = m_offset + row_of_thread(thread)](int row) {
    int32_t const head_of_tile = arguments.packing.head(first + 8 * row);
    return tile.work.head + min_of(head_of_tile, tile.heads - 1);
  };
}

// Stores a warpgroup's 64 rows, from row `m_offset` of the tile on.
//   rO         (2, DV columns of a thread)  normalised
//   rLse       (2)
//   first_col  the first column that the warpgroup has; whoever has column 0 stores the LSE
template <class Element, class Output, class Rows>
CUTE_DEVICE void store_tile(ForwardArguments const& arguments, ForwardTile const& tile,
                            int32_t m_offset, int thread, Output const& rO, Rows const& rLse,
                            int32_t first_col = 0) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(rO) == Int<2>{});
  CUTE_STATIC_ASSERT_V(size(rLse) == size<0>(rO));
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    StoreRow<Element> const target(arguments, tile, m_offset + row_of_thread(thread) + 8 * row);
    store_row(rO(row, _), target.o + first_col, target.inside,
              arguments.params.head_dim_v - first_col, thread);
    if (first_col == 0 && target.lse != nullptr && target.inside && thread % kThreadsPerRow == 0) {
      *target.lse = rLse(row);
    }
  }
}

// Writes what a split has of a warpgroup's 64 rows to the workspace (core/key_splits.h).
//   rO              (2, DV columns of a thread)
//   rSums, rBases   (2)
//   first_col       as in store_tile()
template <class Output, class Rows>
CUTE_DEVICE void store_split(ForwardArguments const& arguments, ForwardTile const& tile,
                             int32_t m_offset, int thread, Output const& rO, Rows const& rSums,
                             Rows const& rBases, int32_t first_col = 0) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(rO) == Int<2>{});
  CUTE_STATIC_ASSERT_V(size(rSums) == size<0>(rO));
  ForwardParams const& params = arguments.params;
  int const t = thread % kThreadsPerRow;
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    TileRow const target(arguments, tile, m_offset + row_of_thread(thread) + 8 * row);
    if (!target.inside) {
      continue;
    }
    int64_t const index = target.index(params, tile);
    float* const o = split_output(params, tile.split, index) + first_col + 2 * t;
    CUTE_UNROLL
    for (int block = 0; block < size<1>(rO) / 2; ++block) {  // of 8 columns
      if (first_col + 8 * block < params.head_dim_v) {
        *reinterpret_cast<float2*>(o + 8 * block) =
            float2{rO(row, 2 * block), rO(row, 2 * block + 1)};
      }
    }
    if (first_col == 0 && t == 0) {
      *split_sum(params, tile.split, index) = {rBases(row), rSums(row)};
    }
  }
}

// Stores a warpgroup's 64 rows of a tile whose queries see no key: zeros, and the LSE of
// the sink alone; of a split, that it has seen none.
template <class Row>
CUTE_DEVICE void store_empty(ForwardArguments const& arguments, ForwardTile const& tile,
                             int32_t m_offset, int thread) {
  using Element = ElementOf<Row::kKey.dtype>;
  int const t = thread % kThreadsPerRow;
  for (int row = 0; row < 2; ++row) {
    StoreRow<Element> const target(arguments, tile, m_offset + row_of_thread(thread) + 8 * row);
    if (!target.inside) {
      continue;
    }
    if (has_splits(arguments.params)) {
      if (t == 0) {
        *split_sum(arguments.params, tile.split, target.index(arguments.params, tile)) = {0.f, 0.f};
      }
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
