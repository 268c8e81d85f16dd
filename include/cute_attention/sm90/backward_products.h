// sm90/backward_products.h: the products of a step of the backward kernel, each of which a consumer
// warpgroup starts by itself, and how it hands dS and dQ over. In which order it does so,
// backward_compute.h and backward_chunks.h say.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/global_sum.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm90/backward_pointwise.h"
#include "cute_attention/sm90/backward_store.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/gemm.h"

namespace cute_attention::sm90 {

//   kWritesGradQ  whether dQ of a step is written to its place. Else another warp adds it to sums.
template <class Row, bool kWritesGradQ>
struct BackwardProducts : BackwardPointwise<Row> {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Pointwise = BackwardPointwise<Row>;
  using FragmentS = typename Pointwise::FragmentS;
  using Operand = typename Pointwise::Operand;
  using QueryRing = Ring<Traits::kStages>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  // Whether what the next block needs comes as early as it can. Then dV leaves while the other
  // warpgroup ends its last step.
  static constexpr bool kOverlapsBlocks = Traits::kOverlapsBlocks;

  template <class Mma, int kRows, int kCols>
  using Fragment = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  using FragmentK = Fragment<typename Traits::MmaK, kTileN, kHeadDim>;
  using FragmentV = Fragment<typename Traits::MmaV, kTileN, kHeadDimV>;
  using FragmentQ = Fragment<typename Traits::MmaQ, kWarpgroupM, Traits::kColsQ>;
  using FragmentP =
      typename Pointwise::FragmentP;  // of a chunk: of a whole step where there is one
  using OperandP = decltype(cute::make_tensor<Element>(as_a_operand(FragmentP{}.layout())));

  using Pointwise::arguments;
  using Pointwise::shared;
  using Pointwise::thread;
  int const warpgroup;  // of the consumers

  FragmentK tdKrdK;  // (MMA, MMA_N, MMA_D)
  FragmentV tdVrdV;  // (MMA, MMA_N, MMA_DV)
  // How many steps, and how many dS, there were before this step in all blocks of this CTA. Before
  // the first step of each block comes a dS that nobody writes. So their difference is the number
  // of blocks that had steps; where blocks overlap, of those before which there was no step. Where
  // dQ is not late there is no such dS, but it is counted.
  int32_t steps_before = 0;
  int32_t grads_before = 0;

  CUTE_DEVICE BackwardProducts(BackwardArguments const& arguments, SharedMemory& shared,
                               int warpgroup, int thread)
      : Pointwise(arguments, shared, thread), warpgroup(warpgroup) {}

 protected:
  CUTE_DEVICE static Ring<Traits::kStagesK> keys_of(int32_t number) {
    return buffer_of<Traits::kStagesK>(number);
  }

  // The number of the dS whose dQ a step computes, and of the one that it writes, of all of this
  // CTA.
  CUTE_DEVICE int32_t number_of_dq() const {
    return Traits::kGradQLag > 0 ? grads_before : steps_before;
  }
  CUTE_DEVICE int32_t number_of_ds() const { return number_of_dq() + Traits::kGradQLag; }

  CUTE_DEVICE static QueryRing queries_of(int32_t number) {
    return buffer_of<Traits::kStages>(number);
  }
  CUTE_DEVICE static Ring<Traits::kStagesS> grad_s_of(int32_t number) {
    return buffer_of<Traits::kStagesS>(number);
  }

  // `value`, but where registers are few in such a way that none keeps what follows from it: the
  // descriptors of operands, above all, are computed at each use (core/opaque.h).
  template <class Value>
  CUTE_DEVICE static Value anew(Value value) {
    if constexpr (Traits::kInChunks) {
      return opaque(value);
    } else {
      return value;
    }
  }

  // This warp's MMAs have read Q and dO of the step before, and its lanes the LSE and delta.
  CUTE_DEVICE void release_queries() {
    __syncwarp();
    uint32_t const stage = queries_of(steps_before - 1).stage;
    arrive(shared.query_empty[stage]);
    arrive(shared.grad_o_empty[stage]);
  }

  // Tells another warp that this warp's MMAs have read a buffer, or that it has filled one.
  CUTE_DEVICE void arrive(uint64_t& barrier) {
    if (thread % 32 == 0) {
      Barrier::arrive(&barrier);
    }
  }

  CUTE_DEVICE void await_values() const {
    Barrier::wait(&shared.value_full, uint32_t(grads_before - steps_before) % 2);
  }

  // Where K of this block is.
  CUTE_DEVICE uint32_t key_stage() const { return keys_of(grads_before - steps_before).stage; }

  // Starts S^T = K Q^T with the K of stage `stage_k` and the Q of `ring`.
  CUTE_DEVICE void start_scores(FragmentS& tSrS, QueryRing const& ring, uint32_t stage_k) {
    using namespace cute;
    typename Traits::MmaS mma;
    Tensor sK = in_shared<typename Traits::SmemLayoutK>(shared.k);  // (N, D, STAGE)
    Tensor sQ = in_shared<typename Traits::SmemLayoutQ>(shared.q);  // (M, D, STAGE)
    auto const thread_mma = mma.get_slice(anew(warpgroup) * kWarpgroupThreads);
    Tensor tSrK = thread_mma.partition_fragment_A(sK);  // (MMA, MMA_N, MMA_D, STAGE)
    Tensor tSrQ = thread_mma.partition_fragment_B(sQ);  // (MMA, MMA_M, MMA_D, STAGE)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tSrK(_, _, _, stage_k), tSrQ(_, _, _, anew(ring.stage)),
                                     tSrS);
  }

  // Starts dP^T = V dO^T, or dP^T + delta in accumulators that contain delta (kStartsWithDelta). In
  // chunks: of those queries alone.
  CUTE_DEVICE void start_grad_p(FragmentP& tdPrdP, QueryRing const& ring, int chunk = 0) {
    using namespace cute;
    Barrier::wait(&shared.grad_o_full[ring.stage], ring.parity);
    if constexpr (Pointwise::kStartsWithDelta) {
      copy(row_numbers<Traits>(thread, shared.delta[ring.stage]), tdPrdP);
    }
    typename Traits::MmaP mma;
    Tensor sV = in_shared<typename Traits::SmemLayoutV>(shared.v);            // (N, DV, 1)
    Tensor sdO = in_shared<typename Traits::SmemLayoutGradO>(shared.grad_o);  // (M, DV, STAGE)
    Tensor sdO_chunk =                                                        // (CHUNK_M, DV)
        local_tile(sdO, Shape<Int<Traits::kChunkM>, Int<kHeadDimV>>{},
                   make_coord(chunk, _0{}, anew(ring.stage)));
    auto const thread_mma = mma.get_slice(anew(warpgroup) * kWarpgroupThreads);
    Tensor tdPrV = thread_mma.partition_fragment_A(sV);          // (MMA, MMA_N, MMA_DV, 1)
    Tensor tdPrdO = thread_mma.partition_fragment_B(sdO_chunk);  // (MMA, MMA_M, MMA_DV)
    start_gemm<Pointwise::kStartsWithDelta ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero>(
        mma, tdPrV(_, _, _, 0), tdPrdO, tdPrdP);
  }

  // Starts dV += P^T dO.
  CUTE_DEVICE void start_grad_v(Operand const& tdVrP, QueryRing const& ring) {
    using namespace cute;
    typename Traits::MmaV mma;
    Tensor sdOt = in_shared<typename Traits::SmemLayoutGradOt>(shared.grad_o);  // (DV, M, STAGE)
    Tensor tdVrdO = mma.get_slice(0).partition_fragment_B(sdOt);  // (MMA, MMA_DV, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdVrP, tdVrdO(_, _, _, anew(ring.stage)), tdVrdV);
  }

  // Starts dK += dS^T Q.
  CUTE_DEVICE void start_grad_k(Operand const& tdKrdS, QueryRing const& ring) {
    using namespace cute;
    typename Traits::MmaK mma;
    Tensor sQt = in_shared<typename Traits::SmemLayoutQt>(shared.q);  // (D, M, STAGE)
    Tensor tdKrQ = mma.get_slice(0).partition_fragment_B(sQt);        // (MMA, MMA_D, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdKrdS, tdKrQ(_, _, _, ring.stage), tdKrdK);
  }

  // The same with the dS^T that this warpgroup has written to shared memory.
  CUTE_DEVICE void start_grad_k(QueryRing const& ring) {
    using namespace cute;
    typename Traits::MmaK mma;
    Tensor sdSt = in_shared<typename Traits::SmemLayoutSt>(shared.grad_s);  // (N, M, STAGE)
    Tensor sQt = in_shared<typename Traits::SmemLayoutQt>(shared.q);        // (D, M, STAGE)
    auto const thread_mma = mma.get_slice(anew(warpgroup) * kWarpgroupThreads);
    Tensor tdKrdS = thread_mma.partition_fragment_A(sdSt);  // (MMA, MMA_N, MMA_M, STAGE)
    Tensor tdKrQ = thread_mma.partition_fragment_B(sQt);    // (MMA, MMA_D, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdKrdS(_, _, _, grad_s_of(number_of_ds()).stage),
                                    tdKrQ(_, _, _, anew(ring.stage)), tdKrdK);
  }

  // Waits until the dS of which dQ is computed is there, of all keys.
  CUTE_DEVICE void await_grad_s() const {
    auto const ring_s = grad_s_of(number_of_dq());
    Barrier::wait(&shared.grad_s_full[ring_s.stage], ring_s.parity);
  }

  // Starts this warpgroup's part of dQ = dS K, with the K of stage `stage_k`.
  CUTE_DEVICE void start_grad_q(FragmentQ& tdQrdQ, uint32_t stage_k) {
    using namespace cute;
    auto const ring_s = grad_s_of(number_of_dq());
    typename Traits::MmaQ mma;
    Tensor sdS = in_shared<typename Traits::SmemLayoutS>(shared.grad_s);  // (M, N, STAGE)
    Tensor sKt = in_shared<typename Traits::SmemLayoutKt>(shared.k);      // (D, N, STAGE)
    Tensor sdS_part =                                                     // (64, N)
        local_tile(sdS, Shape<Int<kWarpgroupM>, Int<kTileN>>{},
                   make_coord(Traits::row_part_q(warpgroup), _0{}, ring_s.stage));
    Tensor sKt_part =  // (COLS_Q, N)
        local_tile(sKt, Shape<Int<Traits::kColsQ>, Int<kTileN>>{},
                   make_coord(Traits::col_part_q(anew(warpgroup)), _0{}, stage_k));
    auto const thread_mma = mma.get_slice(0);
    Tensor tdQrdS = thread_mma.partition_fragment_A(sdS_part);  // (MMA, MMA_M, MMA_N)
    Tensor tdQrK = thread_mma.partition_fragment_B(sKt_part);   // (MMA, MMA_D, MMA_N)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tdQrdS, tdQrK, tdQrdQ);
  }

  // Writes dS^T, as it is in registers for dK, where dQ reads it. Nobody is told of it yet.
  CUTE_DEVICE void store_grad_s(Operand const& tdKrdS) {
    write_grad_s(tdKrdS, awaited_grad_s_buffer());
  }

  // Tells all warpgroups of the dS of this step.
  CUTE_DEVICE void tell_of_grad_s() {
    end_writes();
    arrive(shared.grad_s_full[grad_s_of(number_of_ds()).stage]);
  }

  // Tells the warp that adds it to its sums of the part of dQ that this warp has staged.
  CUTE_DEVICE void tell_of_grad_q() {
    if constexpr (!kWritesGradQ) {
      end_writes();
      arrive(shared.grad_q_full[warpgroup]);
    }
  }

  // Tells of both dS and dQ of the step before, behind one fence (kTellsLate).
  //   has_step  whether this block had a step before
  CUTE_DEVICE void tell_of_step(bool has_step) {
    end_writes();
    if (has_step) {
      arrive(shared.grad_s_full[grad_s_of(number_of_ds() - 1).stage]);
      if constexpr (!kWritesGradQ) {
        arrive(shared.grad_q_full[warpgroup]);
      }
    }
  }

  // The buffer for dS of this step, when dQ of the dS that was there is computed.
  CUTE_DEVICE uint32_t awaited_grad_s_buffer() const {
    auto const ring_s = grad_s_of(number_of_ds());
    Barrier::wait(&shared.grad_s_empty[ring_s.stage], ring_s.parity ^ 1);
    return ring_s.stage;
  }

  // Writes dS^T, in chunks that of one of them.
  CUTE_DEVICE void write_grad_s(OperandP const& tdPrdS, uint32_t stage, int chunk = 0) {
    using namespace cute;
    Tensor sdSt = in_shared<typename Traits::SmemLayoutSt>(shared.grad_s);  // (N, M, STAGE)
    Tensor sdSt_chunk =                                                     // (N, CHUNK_M)
        local_tile(sdSt, Shape<Int<kTileN>, Int<Traits::kChunkM>>{},
                   make_coord(_0{}, chunk, stage));
    auto const thread_copy = typename Traits::SmemCopyS{}.get_slice(opaque(thread));
    Tensor rdS = make_tensor(tdPrdS.data(), FragmentP{}.layout());  // (MMA, MMA_N, MMA_M)
    Tensor source = thread_copy.retile_S(rdS);                      // (COPY, COPY_N, COPY_M)
    Tensor target = thread_copy.partition_D(sdSt_chunk);            // (COPY, COPY_N, COPY_M)
    copy(typename Traits::SmemCopyS{}, source, target);
  }

  // This warpgroup's part of dQ is there: writes it to its place, or stages it for the warp that
  // adds it, which is not told of it yet.
  //   work     of the step whose dQ it is
  //   of_step  whether there is such a step
  //   tdQrdQ   (MMA, MMA_M, MMA_D)
  CUTE_DEVICE void hand_over_grad_q(BackwardWork const& work, bool of_step, FragmentQ& tdQrdQ) {
    cute::warpgroup_fence_operand(tdQrdQ);
    arrive(shared.grad_s_empty[grad_s_of(number_of_dq()).stage]);
    if constexpr (!kWritesGradQ) {
      stage_grad_q(tdQrdQ);
    } else if (of_step) {
      auto const ring = queries_of(steps_before - Traits::kGradQLag);
      store_grad_queries<Traits>(arguments.params, work, shared.step_tiles[tile_slot(ring)],
                                 warpgroup, opaque(thread) % kWarpgroupThreads, tdQrdQ);
    }
  }

 private:
  // Writes dQ where the warp that adds it to its sums reads it.
  //   tdQrdQ  (MMA, MMA_M, MMA_D)
  CUTE_DEVICE void stage_grad_q(FragmentQ const& tdQrdQ) {
    Barrier::wait(&shared.grad_q_empty[warpgroup], uint32_t(number_of_dq()) % 2 ^ 1);
    auto* const staged = reinterpret_cast<float4*>(shared.grad_q[warpgroup]);
    int const lane = thread % kWarpgroupThreads;
    CUTE_UNROLL
    for (int v = 0; v < decltype(cute::size(tdQrdQ))::value / 4; ++v) {
      staged[vector_in_block<kWarpgroupThreads>(v, lane)] =
          make_float4(tdQrdQ(4 * v), tdQrdQ(4 * v + 1), tdQrdQ(4 * v + 2), tdQrdQ(4 * v + 3));
    }
  }

  // WGMMAs and bulk copies that follow an arrival of this warp read what its lanes have written.
  CUTE_DEVICE static void end_writes() {
    fence_shared_memory();
    __syncwarp();
  }
};

}  // namespace cute_attention::sm90
