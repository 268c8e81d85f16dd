// sm80/bias_tile.h: a tile of a bias that goes through shared memory, copied by cp.async and read
// by ldmatrix, whose matrices of 8 x 8 are those of an accumulator.
//
// A thread that reads the numbers of its own scores from global memory (core/bias.h) loads two
// bytes at a time, and a warp's load of eight rows takes about 23 clocks on an NVIDIA H200. This
// way a thread gets eight numbers of its own with one instruction, and copies eight with another.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/bias.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/warp.h"
#include "cute_attention/sm80/smem_operand.h"
#include "cute_attention/sm80/swizzled_layout.h"

namespace cute_attention::sm80 {

// Whether tiles of the bias of a sequence go through shared memory. A packed sequence that is
// longer than params.seqlen_q or seqlen_k says has scores without a bias, which become NaN
// (core/bias.h).
//   kScoreMods  of the row
template <uint32_t kScoreMods, class Params>
CUTE_DEVICE bool has_bias_tiles(Params const& params, Sequence const& sequence) {
  return call_has<kScoreMods, score_mods::Bias>(params) && has_vectors(params.bias) &&
         sequence.seqlen_q <= params.seqlen_q && sequence.seqlen_k <= params.seqlen_k;
}

// Copies up to 16 bytes from global to shared memory, and writes zeros behind them. PTX ISA,
// "cp.async".
CUTE_DEVICE void cp_async_first_bytes(uint32_t target, void const* source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes));
}

// Room for a tile in shared memory, of rows that have a bias.
template <bool kHasBias, class Element, int kTileNumbers>
struct BiasBuffer {
  cute::array_aligned<Element, kTileNumbers, 128> bias;
};
template <class Element, int kTileNumbers>
struct BiasBuffer<false, Element, kTileNumbers> {};

//   SmemLayout  (M, N), swizzled
//   kRow        elements in a row of the swizzled atom
template <class Element, class SmemLayout, int kRow>
struct BiasTile {
  using Swizzled = SwizzledLayout<SmemLayout>;
  static constexpr int kTileM = decltype(cute::size<0>(SmemLayout{}))::value;
  static constexpr int kTileN = decltype(cute::size<1>(SmemLayout{}))::value;
  static constexpr uint32_t kElementBytes = sizeof(Element);

  uint32_t buffer;  // shared-memory address

  CUTE_DEVICE explicit BiasTile(Element const* tile) : buffer(cute::cast_smem_ptr_to_uint(tile)) {}
  CUTE_HOST_DEVICE explicit constexpr BiasTile(uint32_t address) : buffer(address) {}

  // Starts the copy of a tile by the `kThreads` threads of a CTA. Zeros take the place of queries
  // and keys that the sequence does not have: NaN must not reach their scores.
  //   head  where the bias of the head begins (bias_of_head())
  template <int kThreads>
  CUTE_DEVICE void load(void const* head, int64_t row_stride, Sequence const& sequence,
                        int32_t m_begin, int32_t n_begin, int thread) const {
    using namespace cute;
    constexpr int kVectors = kTileN / 8;
    static_assert(kTileM * kVectors % kThreads == 0, "each thread copies as many vectors");
    int32_t const rows = sequence.seqlen_q - m_begin;
    Element const* const tile =
        static_cast<Element const*>(head) + m_begin * row_stride + int64_t(n_begin);
    CUTE_UNROLL
    for (int i = 0; i < kTileM * kVectors / kThreads; ++i) {
      int const vector = i * kThreads + thread;
      int const row = vector / kVectors, col = vector % kVectors * 8;
      int32_t const cols = row < rows ? min_of(max_of(sequence.seqlen_k - n_begin - col, 0), 8) : 0;
      uint32_t const place = Swizzled::swizzle(typename Swizzled::Linear{}(row, col));
      cp_async_first_bytes(buffer + place * kElementBytes,
                           cols > 0 ? tile + row * row_stride + col : tile,
                           cols * int(kElementBytes));
    }
  }

  // Adds the tile to the scores of an accumulator: of S (M, N), or with kTransposed of S^T (N, M).
  //   tCrC      (MMA, MMA_M, MMA_N), or (MMA, MMA_N, MMA_M)
  //   per_unit  what a number of the bias is multiplied by, in the unit of scores
  template <class TiledMma, bool kTransposed, class Scores>
  CUTE_DEVICE void add(Scores& tCrC, float per_unit, int thread) const {
    using namespace cute;
    uint32_t const first = first_address<TiledMma, kTransposed>(thread);
    auto const places = offsets<TiledMma, kTransposed>(_0{});  // ((2, 2), MMA_ROWS, MMA_COLS)
    CUTE_STATIC_ASSERT_V(size<1>(places) == size<1>(tCrC));
    CUTE_STATIC_ASSERT_V(size<2>(places) == size<2>(tCrC));
    CUTE_UNROLL
    for (int block = 0; block < size<2>(places); block += 2) {
      add_blocks<kTransposed>(first, places, block, tCrC, block, per_unit);
    }
  }

  // Adds the part of the tile beside two blocks of columns, from `block` on, to a copy of the
  // scores that an accumulator has there.
  //   copies  (MMA, MMA_M, 2), or (MMA, MMA_N, 2)
  template <class TiledMma, bool kTransposed, class Copies>
  CUTE_DEVICE void add_to_copies(int block, Copies& copies, float per_unit, int thread) const {
    auto const places = offsets<TiledMma, kTransposed>(cute::_0{});  // ((2, 2), MMA_ROWS, MMA_COLS)
    CUTE_STATIC_ASSERT_V(cute::size<1>(places) == cute::size<1>(copies));
    CUTE_STATIC_ASSERT_V(cute::size<2>(copies) == cute::_2{});
    add_blocks<kTransposed>(first_address<TiledMma, kTransposed>(thread), places, block, copies, 0,
                            per_unit);
  }

  // Where in the tile, before the swizzle, the numbers of a thread's scores lie.
  template <class TiledMma, bool kTransposed, class Thread>
  CUTE_HOST_DEVICE static constexpr auto offsets(Thread const& thread) {
    using namespace cute;
    auto const linear = [] {
      if constexpr (kTransposed) {
        return composition(typename Swizzled::Linear{},  // (N, M)
                           Layout<Shape<Int<kTileN>, Int<kTileM>>, Stride<Int<kTileM>, _1>>{});
      } else {
        return typename Swizzled::Linear{};  // (M, N)
      }
    }();
    return TiledMma{}.get_slice(thread).partition_C(make_tensor(counting_iterator<int>{}, linear));
  }

  // The address that this thread gives to the ldmatrix of its first blocks. ldmatrix takes from
  // lane l the address of row l % 8 of matrix l / 8. The matrices are the upper and the lower half
  // of a block of 16 x 8 scores, and those of the block beside it. The lane finds the row as a
  // number of the thread whose score stands first in it.
  template <class TiledMma, bool kTransposed>
  CUTE_HOST_DEVICE uint32_t first_address(int thread) const {
    using namespace cute;
    int const lane = thread % 32, row = lane % 8, half = lane / 8 % 2, block = lane / 16;
    int const owner = thread - lane + (kTransposed ? row / 2 : row * 4);
    uint32_t const offset = offsets<TiledMma, kTransposed>(owner)(
        make_coord(kTransposed ? row % 2 : 0, half), 0, block);
    return buffer + Swizzled::swizzle(offset) * kElementBytes;
  }

  // The address for the blocks that lie, for thread 0, `distance` elements after its first ones
  // (smem_operand.h).
  CUTE_HOST_DEVICE static constexpr uint32_t block_address(uint32_t first, uint32_t distance) {
    uint32_t const offset = Swizzled::swizzle(distance) * kElementBytes;
    uint32_t const in_row = offset % (kRow * kElementBytes);
    return (first ^ in_row) + (offset - in_row);
  }

 private:
  // Adds the numbers of two blocks of columns, from `block` on, to the columns of `tCrC` from `to`
  // on.
  //   first   address of the thread's first blocks
  //   places  offsets() of thread 0
  template <bool kTransposed, class Places, class Scores>
  CUTE_DEVICE static void add_blocks(uint32_t first, Places const& places, int block, Scores& tCrC,
                                     int to, float per_unit) {
    using namespace cute;
    static_assert(decltype(size<2>(places))::value % 2 == 0,
                  "ldmatrix reads two blocks of columns");
    CUTE_UNROLL
    for (int row = 0; row < size<1>(places); ++row) {
      uint32_t pairs[4];
      ldmatrix<kTransposed>(block_address(first, places(_0{}, row, block)), pairs[0], pairs[1],
                            pairs[2], pairs[3]);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        float const number = element(pairs[i / 2], i % 2);
        float& score = tCrC(make_coord(i % 2, i / 2 % 2), row, to + i / 4);
        score = fmaf(number, per_unit, score);
      }
    }
  }

  // Number `i` of a pair.
  CUTE_DEVICE static float element(uint32_t pair, int i) {
    return float(Element::bitcast(uint16_t(pair >> (16 * i))));
  }
};

}  // namespace cute_attention::sm80
