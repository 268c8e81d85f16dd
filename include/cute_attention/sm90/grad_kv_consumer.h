// sm90/grad_kv_consumer.h: what both consumer warpgroups of the kernel for dK and dV do alike
// (grad_kv_compute.h).
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/sm90/gemm.h"
#include "cute_attention/sm90/grad_kv_traits.h"

namespace cute_attention::sm90 {

// Takes one block of keys after the other, and counts steps.
//   Compute  GradVCompute or GradKCompute: clear(), begin_keys(), step(), end_keys(), store() and
//            store_part()
template <class Row, class Compute>
struct GradKvConsumer {
  using Traits = GradKvTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Sums = KeyGradientSums<Traits, Traits::kSumThreads>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr bool kDrops = has_dropout(Row::kKey.score_mods);

  template <class Mma, int kCols>
  using Fragment = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kTileN>, cute::Int<kCols>>{}));
  using FragmentS = Fragment<typename Traits::MmaS, kTileM>;
  using Operand = decltype(cute::make_tensor<Element>(as_a_operand(FragmentS{}.layout())));

  BackwardArguments const& arguments;
  SharedMemory& shared;
  int const thread;    // of the warpgroup
  int32_t steps = 0;   // of all blocks before this step
  int32_t blocks = 0;  // with steps, before this one

  CUTE_DEVICE void run() {
    auto& compute = static_cast<Compute&>(*this);
    for (int32_t number = 0;; ++number) {
      auto const slot = buffer_of<kWorkSlots>(number);
      Barrier::wait(&shared.work_full[slot.stage], slot.parity);
      BackwardWork const& work = shared.works[slot.stage];
      if (work.is_end()) {
        break;
      }
      compute.clear();
      int remaining = work.steps.count;
      if (remaining > 0) {
        compute.begin_keys(uint32_t(blocks) % 2);
        do {
          compute.step(work);
          ++steps;
        } while (--remaining > 0);
        compute.end_keys();
        ++blocks;
      }
      if (arguments.schedule.parts.count == 1) {
        compute.store(work);
      } else if (work.steps.count > 0) {
        compute.store_part(work);
      }
      __syncwarp();  // all lanes have read the work
      arrive_by_warp(shared.work_empty[slot.stage]);
    }
  }

 protected:
  // Starts the product of K and Q, or of V and dO.
  //   tCrC  (MMA, MMA_N, MMA_M)
  template <class Mma, class LayoutA, class LayoutB, class A, class B>
  CUTE_DEVICE static void start_scores(A& a, B& b, uint32_t stage, FragmentS& tCrC) {
    using namespace cute;
    Tensor sA = in_shared<LayoutA>(a);  // (N, D, 1)
    Tensor sB = in_shared<LayoutB>(b);  // (M, D, STAGE)
    auto const thread_mma = Mma{}.get_slice(0);
    Tensor tCrA = thread_mma.partition_fragment_A(sA);  // (MMA, MMA_N, MMA_D, 1)
    Tensor tCrB = thread_mma.partition_fragment_B(sB);  // (MMA, MMA_M, MMA_D, STAGE)
    start_gemm<GMMA::ScaleOut::Zero>(Mma{}, tCrA(_, _, _, 0), tCrB(_, _, _, stage), tCrC);
  }

  // Starts adding a product of P^T and dO to dV, or of dS^T and Q to dK.
  //   tCrA  (MMA, MMA_N, MMA_M), tCrC  (MMA, MMA_N, MMA_D)
  template <class Mma, class LayoutB, class B, class Gradient>
  CUTE_DEVICE static void start_gradient(Operand const& tCrA, B& b, uint32_t stage,
                                         Gradient& tCrC) {
    using namespace cute;
    Tensor sB = in_shared<LayoutB>(b);                          // (D, M, STAGE)
    Tensor tCrB = Mma{}.get_slice(0).partition_fragment_B(sB);  // (MMA, MMA_D, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(Mma{}, tCrA, tCrB(_, _, _, stage), tCrC);
  }

  // Vector v of this thread in a buffer of factors.
  CUTE_DEVICE float4& factors(uint32_t stage, int v) const {
    return reinterpret_cast<float4*>(shared.factor[stage])[Traits::factor_vector(v, thread)];
  }
  static constexpr int kFactorVectors = kTileM * kTileN / kWarpgroupThreads / 4;

  // Where the rows of a block of keys begin in a gradient.
  CUTE_DEVICE Element* first_key(void* gradient, Strides const& stride,
                                 BackwardWork const& work) const {
    return row_pointer(static_cast<Element*>(gradient), stride, work.tile.batch, work.tile.head_kv,
                       work.sequence.row_k + int64_t(work.tile.n_block) * kTileN);
  }
  CUTE_DEVICE static int32_t keys_left(BackwardWork const& work) {
    return work.sequence.seqlen_k - work.tile.n_block * kTileN;
  }
};

}  // namespace cute_attention::sm90
