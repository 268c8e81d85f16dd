// sm80/gemm.h: matrix products of a warp. While the MMAs of one K block run, ldmatrix loads the
// next K block; other work can be placed between the MMAs of one K block and the next. kAhead is
// how many blocks ahead of its MMAs a block is loaded, at most the whole operand.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/sm80/smem_operand.h"
#include "cute_attention/study.h"

namespace cute_attention::sm80 {

struct NoWork {
  CUTE_DEVICE void operator()(int) const {}
};

// Loads the K blocks before the first MMAs: load(k) loads block k of kBlocks.
template <int kBlocks, int kAhead, class Load>
CUTE_DEVICE void load_first_blocks(Load&& load) {
  CUTE_UNROLL
  for (int k = 0; k < (kAhead < kBlocks ? kAhead : kBlocks); ++k) {
    load(k);
  }
}

// A product whose operands lie in shared memory. Making it loads the first K blocks, so that other
// work may stand between these loads and the first MMAs.
//   tCrA  (MMA, MMA_M, MMA_K)    tCrB  (MMA, MMA_N, MMA_K)
template <class TiledMma, int kAhead, class OperandA, class OperandB, class FragmentA,
          class FragmentB>
struct SmemProduct {
  OperandA a;
  OperandB b;
  FragmentA tCrA;
  FragmentB tCrB;
  static constexpr int kBlocks = decltype(cute::size<2>(FragmentA{}))::value;
  CUTE_STATIC_ASSERT_V(cute::size<2>(FragmentA{}) == cute::size<2>(FragmentB{}), "one K");

  CUTE_DEVICE void load(int k) {
    a.load(tCrA, k);
    b.load(tCrB, k);
  }

  // C += A B. Calls work(k) after the MMAs of K block k.
  //   tCrC  (MMA, MMA_M, MMA_N)
  template <class Accumulator, class Work>
  CUTE_DEVICE void add_to(Accumulator& tCrC, Work&& work) {
    using namespace cute;
    CUTE_STATIC_ASSERT_V(size<1>(tCrA) == size<1>(tCrC));
    CUTE_STATIC_ASSERT_V(size<1>(tCrB) == size<2>(tCrC));
    CUTE_UNROLL
    for (int k = 0; k < kBlocks; ++k) {
      if (k + kAhead < kBlocks) {
        load(k + kAhead);
      }
      gemm(TiledMma{}, tCrA(_, _, k), tCrB(_, _, k), tCrC);
      work(k);
    }
  }
};

//   a     (M, K)    b     (N, K)
template <class TiledMma, int kAhead = TableChoices::kFragmentsAhead, class OperandA,
          class OperandB>
CUTE_DEVICE auto smem_product(OperandA const& a, OperandB const& b) {
  auto const thread_mma = TiledMma{}.get_slice(cute::_0{});
  auto tCrA = thread_mma.partition_fragment_A(a.shape_tensor());  // (MMA, MMA_M, MMA_K)
  auto tCrB = thread_mma.partition_fragment_B(b.shape_tensor());  // (MMA, MMA_N, MMA_K)
  using Product = SmemProduct<TiledMma, kAhead, OperandA, OperandB, decltype(tCrA), decltype(tCrB)>;
  Product product{a.here(), b.here(), tCrA, tCrB};
  load_first_blocks<Product::kBlocks, kAhead>([&](int k) { product.load(k); });
  return product;
}

// The whole product at once: C += A B.
//   a     (M, K)    b     (N, K)    tCrC  (MMA, MMA_M, MMA_N)
template <int kAhead = TableChoices::kFragmentsAhead, class TiledMma, class OperandA,
          class OperandB, class Accumulator, class Work = NoWork>
CUTE_DEVICE void gemm_smem(TiledMma const&, OperandA const& a, OperandB const& b, Accumulator& tCrC,
                           Work&& work = {}) {
  smem_product<TiledMma, kAhead>(a, b).add_to(tCrC, work);
}

// C += A B with A from registers: make_a(k) returns K block k of A, (MMA, MMA_M).
//   b     (N, K)    tCrC  (MMA, MMA_M, MMA_N)
template <int kAhead = TableChoices::kFragmentsAhead, class TiledMma, class MakeA, class OperandB,
          class Accumulator>
CUTE_DEVICE void gemm_register_a(TiledMma const& mma, MakeA&& make_a, OperandB const& b,
                                 Accumulator& tCrC) {
  using namespace cute;
  Tensor tCrB = mma.get_slice(_0{}).partition_fragment_B(b.shape_tensor());  // (MMA, MMA_N, MMA_K)
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == size<2>(tCrC));
  OperandB const b_here = b.here();
  load_first_blocks<decltype(size<2>(tCrB))::value, kAhead>([&](int k) { b_here.load(tCrB, k); });
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) {
    Tensor tCrA = make_a(k);  // (MMA, MMA_M)
    CUTE_STATIC_ASSERT_V(size<1>(tCrA) == size<1>(tCrC));
    if (k + kAhead < size<2>(tCrB)) {
      b_here.load(tCrB, k + kAhead);
    }
    gemm(mma, tCrA, tCrB(_, _, k), tCrC);
  }
}

// Loads all K blocks of B into registers, (MMA, MMA_N, MMA_K), for a product that cannot begin yet.
//   b     (N, K)
template <class TiledMma, class OperandB>
CUTE_DEVICE auto load_operand_b(TiledMma const& mma, OperandB const& b) {
  using namespace cute;
  Tensor tCrB =  // (MMA, MMA_N, MMA_K)
      mma.get_slice(_0{}).partition_fragment_B(b.shape_tensor());
  OperandB const b_here = b.here();
  CUTE_UNROLL
  for (int k = 0; k < size<2>(tCrB); ++k) {
    b_here.load(tCrB, k);
  }
  return tCrB;
}

// C += A B with A from shared memory and B from registers.
//   a     (M, K)    tCrB  (MMA, MMA_N, MMA_K)    tCrC  (MMA, MMA_M, MMA_N)
template <class TiledMma, class OperandA, class FragmentB, class Accumulator>
CUTE_DEVICE void gemm_register_b(TiledMma const& mma, OperandA const& a, FragmentB const& tCrB,
                                 Accumulator& tCrC) {
  using namespace cute;
  Tensor tCrA = mma.get_slice(_0{}).partition_fragment_A(a.shape_tensor());  // (MMA, MMA_M, MMA_K)
  CUTE_STATIC_ASSERT_V(size<2>(tCrA) == size<2>(tCrB));
  CUTE_STATIC_ASSERT_V(size<1>(tCrA) == size<1>(tCrC));
  CUTE_STATIC_ASSERT_V(size<1>(tCrB) == size<2>(tCrC));
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
