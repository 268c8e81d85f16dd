// sm80/backward_gemm.h: products that carry other work along: what is done between the MMAs of one
// K block and the next runs under them. And how an operand in registers gets to other warps.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"

namespace cute_attention::sm80 {

struct NoWork {
  CUTE_DEVICE void operator()(int) const {}
};

// C += A B, both operands from shared memory; work(k) follows K block k.
//   tCrC  (MMA, MMA_M, MMA_N)
//   sA    (M, K)    sB    (N, K)
template <class TiledMma, class CopyA, class CopyB, class SmemA, class SmemB, class Accumulator,
          class Work = NoWork>
CUTE_DEVICE void gemm_and(TiledMma const& mma, CopyA const& copy_a, CopyB const& copy_b,
                          SmemA const& sA, SmemB const& sB, Accumulator& tCrC, int thread,
                          Work&& work = {}) {
  using namespace cute;
  auto const thread_mma = mma.get_slice(thread);
  auto const thread_copy_a = copy_a.get_slice(thread);
  auto const thread_copy_b = copy_b.get_slice(thread);
  Tensor tCsA = thread_copy_a.partition_S(sA);        // (CPY, CPY_M, CPY_K)
  Tensor tCsB = thread_copy_b.partition_S(sB);        // (CPY, CPY_N, CPY_K)
  Tensor tCrA = thread_mma.partition_fragment_A(sA);  // (MMA, MMA_M, MMA_K)
  Tensor tCrB = thread_mma.partition_fragment_B(sB);  // (MMA, MMA_N, MMA_K)
  Tensor tCrA_copy = thread_copy_a.retile_D(tCrA);    // (CPY, CPY_M, CPY_K)
  Tensor tCrB_copy = thread_copy_b.retile_D(tCrB);    // (CPY, CPY_N, CPY_K)
  CUTE_STATIC_ASSERT_V(size<1>(tCsA) == size<1>(tCrA_copy));
  CUTE_STATIC_ASSERT_V(size<1>(tCsB) == size<1>(tCrB_copy));
  copy(copy_a, tCsA(_, _, 0), tCrA_copy(_, _, 0));
  copy(copy_b, tCsB(_, _, 0), tCrB_copy(_, _, 0));
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    if (k + 1 < size<2>(tCrA)) {
      copy(copy_a, tCsA(_, _, k + 1), tCrA_copy(_, _, k + 1));
      copy(copy_b, tCsB(_, _, k + 1), tCrB_copy(_, _, k + 1));
    }
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), tCrC);
    work(k);
  }
}

// C += A B, A made in registers: make_a(k) returns the K block (MMA, MMA_M) of A.
//   tCrC  (MMA, MMA_M, MMA_N)
//   sB    (N, K)
template <class TiledMma, class CopyB, class MakeA, class SmemB, class Accumulator>
CUTE_DEVICE void gemm_of(TiledMma const& mma, CopyB const& copy_b, MakeA&& make_a, SmemB const& sB,
                         Accumulator& tCrC, int thread) {
  using namespace cute;
  auto const thread_copy_b = copy_b.get_slice(thread);
  Tensor tCsB = thread_copy_b.partition_S(sB);               // (CPY, CPY_N, CPY_K)
  Tensor tCrB = mma.get_slice(thread).partition_fragment_B(  // (MMA, MMA_N, MMA_K)
      make_tensor(sB.data(), make_layout(make_shape(size<0>(sB), size<1>(sB)))));
  Tensor tCrB_copy = thread_copy_b.retile_D(tCrB);  // (CPY, CPY_N, CPY_K)
  CUTE_STATIC_ASSERT_V(size<1>(tCsB) == size<1>(tCrB_copy));
  copy(copy_b, tCsB(_, _, 0), tCrB_copy(_, _, 0));
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) {
    Tensor tCrA = make_a(k);  // (MMA, MMA_M)
    if (k + 1 < size<2>(tCrB)) {
      copy(copy_b, tCsB(_, _, k + 1), tCrB_copy(_, _, k + 1));
    }
    gemm(mma, tCrA, tCrB(_, _, k), tCrC);
  }
}

// All K blocks of B in registers, (MMA, MMA_N, MMA_K), for a product that cannot begin yet.
template <class TiledMma, class CopyB, class SmemB>
CUTE_DEVICE auto load_operand_b(TiledMma const& mma, CopyB const& copy_b, SmemB const& sB,
                                int thread) {
  using namespace cute;
  auto const thread_copy_b = copy_b.get_slice(thread);
  Tensor tCrB = mma.get_slice(thread).partition_fragment_B(
      make_tensor(sB.data(), make_layout(make_shape(size<0>(sB), size<1>(sB)))));
  copy(copy_b, thread_copy_b.partition_S(sB), thread_copy_b.retile_D(tCrB));
  return tCrB;
}

// C += A B, A from shared memory, B in registers.
//   tCrC  (MMA, MMA_M, MMA_N)
//   sA    (M, K)
//   tCrB  (MMA, MMA_N, MMA_K)
template <class TiledMma, class CopyA, class SmemA, class FragmentB, class Accumulator>
CUTE_DEVICE void gemm_with_b(TiledMma const& mma, CopyA const& copy_a, SmemA const& sA,
                             FragmentB const& tCrB, Accumulator& tCrC, int thread) {
  using namespace cute;
  auto const thread_copy_a = copy_a.get_slice(thread);
  Tensor tCrA = mma.get_slice(thread).partition_fragment_A(sA);  // (MMA, MMA_M, MMA_K)
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  copy(copy_a, thread_copy_a.partition_S(sA), thread_copy_a.retile_D(tCrA));
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), tCrC);
  }
}

// A part of an accumulator, rounded to Element; `convert` takes its values as they lie.
template <class Element, class Block>
CUTE_DEVICE auto rounded(Block const& block) {
  using namespace cute;
  Tensor compact = make_fragment_like(block);  // as block, without gaps
  copy(block, compact);
  return convert<Element>(compact);
}

// One K block ((2 cols, 2 rows, 2 col blocks), MMA_M) of an A operand as (ROWS, COLS).
template <class Block>
CUTE_DEVICE auto operand_rows(Block&& block) {
  using namespace cute;
  auto const layout = block.layout();
  return make_tensor(block.data(), make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                                               make_layout(get<0, 0>(layout), get<0, 2>(layout))));
}

// Registers of one K block ((2, 2, 2), MMA_M) of a transposed A operand, into columns 16 k .. of
//   tXsX  ((2, 2), MMA_M, MMA_N)  the accumulator's places in shared memory
template <class Block, class Smem>
CUTE_DEVICE void store_operand_block(Block const& block, Smem&& tXsX, int k) {
  using namespace cute;
  Tensor r32 = recast<uint32_t>(block);  // ((1, 2, 2), MMA_M)
  Tensor s32 = recast<uint32_t>(tXsX);   // ((1, 2), MMA_M, MMA_N)
  CUTE_UNROLL
  for (int m = 0; m < size<1>(r32); ++m) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      s32(make_coord(0, i % 2), m, 2 * k + i / 2) = r32(make_coord(0, i % 2, i / 2), m);
    }
  }
}

}  // namespace cute_attention::sm80
