// sm90/forward_store.h: O and the LSE from registers to global memory.
//
// O does not go through shared memory, where all buffers are already used for the next tile.
// Instead the four threads that share a row exchange columns until each holds 16 adjacent bytes.
// They write these with plain stores, which fill whole 32-byte sectors and work for any length,
// packed or not.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/sink.h"
#include "cute_attention/sm90/forward_tile.h"

namespace cute_attention::sm90 {

// Parts of a row that one thread holds, rounded to 16 bits: 2 columns of each of four neighbouring
// blocks of 8 columns; or, after the exchange, all 8 columns of one block.
struct Columns32 {
  uint32_t block[4];  // of four neighbouring blocks
};

// The exchange. Before it thread t of the four holds columns 2t and 2t + 1 of blocks 0 to 3; after
// it all 8 columns of block t, in order. This is the transpose of a 4x4 matrix in two steps, in
// each of which a thread sends the half that the other one needs.
CUTE_DEVICE Columns32 transpose_row_threads(Columns32 const& own, int t) {
  bool const high = t & 2, odd = t & 1;
  // Between t and t ^ 2: which two blocks.
  uint32_t const kept0 = high ? own.block[2] : own.block[0];
  uint32_t const kept1 = high ? own.block[3] : own.block[1];
  uint32_t const got0 = __shfl_xor_sync(0xffffffffu, high ? own.block[0] : own.block[2], 2);
  uint32_t const got1 = __shfl_xor_sync(0xffffffffu, high ? own.block[1] : own.block[3], 2);
  // Between t and t ^ 1: which of the two.
  uint32_t const near = odd ? kept1 : kept0;  // from thread t
  uint32_t const far = odd ? got1 : got0;     // from thread t ^ 2
  uint32_t const near_other = __shfl_xor_sync(0xffffffffu, odd ? kept0 : kept1, 1);  // from t ^ 1
  uint32_t const far_other = __shfl_xor_sync(0xffffffffu, odd ? got0 : got1, 1);     // from t ^ 3
  // In the order of the threads they came from.
  uint32_t const near_even = odd ? near_other : near, near_odd = odd ? near : near_other;
  uint32_t const far_even = odd ? far_other : far, far_odd = odd ? far : far_other;
  return {high ? far_even : near_even, high ? far_odd : near_odd, high ? near_even : far_even,
          high ? near_odd : far_odd};
}

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

// A thread holds parts of two rows of its warpgroup: this one, and the one 8 rows after it.
CUTE_DEVICE int row_of_thread(int thread) {
  return thread / 32 * 16 + thread % 32 / kThreadsPerRow;
}

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
  constexpr int kBlocks = decltype(size<1>(rO))::value / 2;  // of 8 columns
  static_assert(kBlocks % 4 == 0, "four threads exchange whole groups of blocks");
  int const t = thread % kThreadsPerRow;
  CUTE_UNROLL
  for (int row = 0; row < 2; ++row) {
    StoreRow<Element> const target(arguments, tile, m_offset + row_of_thread(thread) + 8 * row);
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; block += 4) {
      Columns32 own;
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) {
        own.block[i] = pack<Element>(rO(row, 2 * (block + i)), rO(row, 2 * (block + i) + 1));
      }
      Columns32 const whole = transpose_row_threads(own, t);
      int const col = 8 * (block + t);
      if (target.inside && col < arguments.params.head_dim_v) {
        *reinterpret_cast<uint4*>(target.o + col) =
            uint4{whole.block[0], whole.block[1], whole.block[2], whole.block[3]};
      }
    }
    if (target.lse != nullptr && target.inside && t == 0) {
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
