// sm90/gemm.h: one warpgroup's asynchronous matrix products.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

namespace cute_attention::sm90 {

// Starts C = A B, or C += A B, as one group of WGMMAs; warpgroup_wait() says when C may be read and
// A's registers or A's and B's shared memory reused.
//   tCrA  (MMA, MMA_M, MMA_K)  registers, or descriptors of shared memory
//   tCrB  (MMA, MMA_N, MMA_K)  descriptors of shared memory
//   tCrC  (MMA, MMA_M, MMA_N)
template <cute::GMMA::ScaleOut kFirst, class TiledMma, class A, class B, class C>
CUTE_DEVICE void start_gemm(TiledMma const& tiled_mma, A const& tCrA, B const& tCrB, C& tCrC) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<1>(tCrA) == size<1>(tCrC));  // MMA_M
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == size<2>(tCrC));  // MMA_N
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));  // MMA_K
  TiledMma mma = tiled_mma;
  mma.accumulate_ = kFirst;
  warpgroup_fence_operand(tCrC);
  warpgroup_arrive();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) {
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), tCrC);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(tCrC);
}

// Starts C = A0 B0 + A1 B1 in the same way.
template <class TiledMma0, class A0, class B0, class TiledMma1, class A1, class B1, class C>
CUTE_DEVICE void start_gemms(TiledMma0 const& tiled_mma0, A0 const& tCrA0, B0 const& tCrB0,
                             TiledMma1 const& tiled_mma1, A1 const& tCrA1, B1 const& tCrB1,
                             C& tCrC) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<2>(tCrA0) == Int<1>{});  // MMA_K
  TiledMma0 mma0 = tiled_mma0;
  TiledMma1 mma1 = tiled_mma1;
  mma0.accumulate_ = GMMA::ScaleOut::Zero;
  mma1.accumulate_ = GMMA::ScaleOut::One;
  warpgroup_fence_operand(tCrC);
  warpgroup_arrive();
  gemm(mma0, tCrA0(_, _, 0), tCrB0(_, _, 0), tCrC);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB1); ++k) {
    gemm(mma1, tCrA1(_, _, k), tCrB1(_, _, k), tCrC);
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(tCrC);
}

}  // namespace cute_attention::sm90
