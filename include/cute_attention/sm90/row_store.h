// sm90/row_store.h: rows of an accumulator, from registers to global memory.
//
// The rows do not go through shared memory, where all buffers are used for what comes next. Instead
// the four threads that share a row exchange columns until each holds 16 adjacent bytes. They write
// these with plain stores, which fill whole 32-byte sectors and work for any length, packed or not.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"

namespace cute_attention::sm90 {

// A thread holds parts of two rows of its warpgroup: this one, and the one 8 rows after it.
CUTE_DEVICE int row_of_thread(int thread) {
  return thread / 32 * 16 + thread % 32 / kThreadsPerRow;
}

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

// Stores one row of an accumulator, rounded to Element. The four threads that share the row call it
// together, each with its own columns.
//   values  (COLS)  the columns of this thread
//   inside  whether the row exists; cols, how many columns it has in memory, a multiple of 8
template <class Element, class Values>
CUTE_DEVICE void store_row(Values const& values, Element* row, bool inside, int32_t cols,
                           int thread) {
  using namespace cute;
  constexpr int kBlocks = decltype(size(values))::value / 2;  // of 8 columns
  int const t = thread % kThreadsPerRow;
  CUTE_UNROLL
  for (int block = 0; block + 4 <= kBlocks; block += 4) {
    Columns32 own;
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      own.block[i] = pack<Element>(values(2 * (block + i)), values(2 * (block + i) + 1));
    }
    Columns32 const whole = transpose_row_threads(own, t);
    int const col = 8 * (block + t);
    if (inside && col < cols) {
      *reinterpret_cast<uint4*>(row + col) =
          uint4{whole.block[0], whole.block[1], whole.block[2], whole.block[3]};
    }
  }
  // Blocks that are too few for an exchange: each thread stores its own two columns.
  CUTE_UNROLL
  for (int block = kBlocks / 4 * 4; block < kBlocks; ++block) {
    if (inside && 8 * block < cols) {
      *reinterpret_cast<uint32_t*>(row + 8 * block + 2 * t) =
          pack<Element>(values(2 * block), values(2 * block + 1));
    }
  }
}

// Stores both rows that this thread has of a warpgroup's accumulator of 64 rows.
//   rC      (MMA, MMA_M, MMA_N)  the accumulator
//   first   the tile's first row in memory; rows, how many of its rows exist there
//   cols    how many columns a row has in memory, a multiple of 8
//   thread  of the warpgroup
template <class Element, class Accumulator>
CUTE_DEVICE void store_rows(Accumulator const& rC, Element* first, int64_t row_stride, int32_t rows,
                            int32_t cols, int thread) {
  using namespace cute;
  Tensor values = make_tensor(rC.data(), rows_and_columns(rC.layout()));  // (ROWS, COLS)
  CUTE_UNROLL
  for (int i = 0; i < 2; ++i) {
    int const row = row_of_thread(thread) + 8 * i;
    store_row(values(i, _), first + row * row_stride, row < rows, cols, thread);
  }
}

}  // namespace cute_attention::sm90
