// sm80/gemm.h: products of a warp: ldmatrix of the next K block under the MMAs of this one, and
// other work between the MMAs of one K block and the next.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/sm80/smem_operand.h"

namespace cute_attention::sm80 {

struct NoWork {
  CUTE_DEVICE void operator()(int) const {}
};

// C += A B, both operands from shared memory; work(k) follows K block k.
//   tCrC  (MMA, MMA_M, MMA_N)
//   a     (M, K)    b     (N, K)
template <class TiledMma, class OperandA, class OperandB, class Accumulator, class Work = NoWork>
CUTE_DEVICE void gemm_smem(TiledMma const& mma, OperandA const& a, OperandB const& b,
                           Accumulator& tCrC, Work&& work = {}) {
  using namespace cute;
  auto const thread_mma = mma.get_slice(_0{});
  Tensor tCrA = thread_mma.partition_fragment_A(a.shape_tensor());  // (MMA, MMA_M, MMA_K)
  Tensor tCrB = thread_mma.partition_fragment_B(b.shape_tensor());  // (MMA, MMA_N, MMA_K)
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  OperandA const a_here = a.here();
  OperandB const b_here = b.here();
  a_here.load(tCrA, 0);
  b_here.load(tCrB, 0);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    if (k + 1 < size<2>(tCrA)) {
      a_here.load(tCrA, k + 1);
      b_here.load(tCrB, k + 1);
    }
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), tCrC);
    work(k);
  }
}

// C += A B, A made in registers: make_a(k) returns K block k of A, (MMA, MMA_M).
//   tCrC  (MMA, MMA_M, MMA_N)
//   b     (N, K)
template <class TiledMma, class MakeA, class OperandB, class Accumulator>
CUTE_DEVICE void gemm_register_a(TiledMma const& mma, MakeA&& make_a, OperandB const& b,
                                 Accumulator& tCrC) {
  using namespace cute;
  Tensor tCrB = mma.get_slice(_0{}).partition_fragment_B(b.shape_tensor());  // (MMA, MMA_N, MMA_K)
  OperandB const b_here = b.here();
  b_here.load(tCrB, 0);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) {
    Tensor tCrA = make_a(k);  // (MMA, MMA_M)
    if (k + 1 < size<2>(tCrB)) {
      b_here.load(tCrB, k + 1);
    }
    gemm(mma, tCrA, tCrB(_, _, k), tCrC);
  }
}

// All K blocks of B in registers, (MMA, MMA_N, MMA_K), for a product that cannot begin yet.
template <class TiledMma, class OperandB>
CUTE_DEVICE auto load_operand_b(TiledMma const& mma, OperandB const& b) {
  using namespace cute;
  Tensor tCrB = mma.get_slice(_0{}).partition_fragment_B(b.shape_tensor());
  OperandB const b_here = b.here();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) {
    b_here.load(tCrB, k);
  }
  return tCrB;
}

// C += A B, A from shared memory, B in registers.
//   tCrC  (MMA, MMA_M, MMA_N)
//   a     (M, K)
//   tCrB  (MMA, MMA_N, MMA_K)
template <class TiledMma, class OperandA, class FragmentB, class Accumulator>
CUTE_DEVICE void gemm_register_b(TiledMma const& mma, OperandA const& a, FragmentB const& tCrB,
                                 Accumulator& tCrC) {
  using namespace cute;
  Tensor tCrA = mma.get_slice(_0{}).partition_fragment_A(a.shape_tensor());  // (MMA, MMA_M, MMA_K)
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  OperandA const a_here = a.here();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    a_here.load(tCrA, k);
  }
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrA); ++k) {
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), tCrC);
  }
}

}  // namespace cute_attention::sm80
