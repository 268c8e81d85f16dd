// sm90/backward_compute.h: what a consumer warpgroup does: dK and dV of its 64 keys, and in turn
// with the others dQ of a step.
//
// Of step m a warpgroup computes, where t is a product of the tensor cores and p is pointwise:
//
//   t  S^T        dP^T         dV           dK        dQ (every kConsumers-th step)
//   p       P^T          dS^T                               added to its sums
//
// S^T of the next step is started before this step's dV and dK are awaited.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/gemm.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

template <class Row>
struct BackwardCompute {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Step = BackwardStep<Element>;
  using Scores = BackwardScores<Row::kKey.score_mod>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;

  template <class Mma, int kRows, int kCols>
  using Fragment = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  using FragmentS = Fragment<typename Traits::MmaS, kTileN, kTileM>;
  using FragmentK = Fragment<typename Traits::MmaK, kTileN, kHeadDim>;
  using FragmentV = Fragment<typename Traits::MmaV, kTileN, kHeadDimV>;
  using FragmentQ = Fragment<typename Traits::MmaQ, kWarpgroupM, Traits::kColsQ>;
  using Operand = decltype(cute::make_tensor<Element>(as_a_operand(FragmentS{}.layout())));

  BackwardArguments const& arguments;
  SharedMemory& shared;
  GradTile const& tile;
  Sequence const& sequence;
  MTiles const& tiles;
  int const warpgroup;  // of the consumers
  int const thread;     // of the consumers
  Scores const scores;

  FragmentK tdKrdK;                 // (MMA, MMA_N, MMA_D)
  FragmentV tdVrdV;                 // (MMA, MMA_N, MMA_DV)
  Ring<Traits::kStages> ring{};     // of Q and dO
  Ring<Traits::kStagesS> ring_s{};  // of dS

  CUTE_DEVICE BackwardCompute(BackwardArguments const& arguments, SharedMemory& shared,
                              int warpgroup, int thread)
      : arguments(arguments),
        shared(shared),
        tile(shared.work.tile),
        sequence(shared.work.sequence),
        tiles(shared.work.tiles),
        warpgroup(warpgroup),
        thread(thread),
        scores(arguments.params) {}

  CUTE_DEVICE void run() {
    cute::clear(tdKrdK);
    cute::clear(tdVrdV);
    BackwardSteps<Element, kTileM> const steps(arguments.params, tile, sequence, tiles);
    int const count = steps.count();
    if (count > 0) {
      Step step = steps.first();
      Barrier::wait(&shared.key_full, 0);
      Barrier::wait(&shared.value_full, 0);
      for (int t = 0; t < count; ++t) {
        compute_step(step, t);
        steps.advance(step);
      }
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(tdKrdK);
      cute::warpgroup_fence_operand(tdVrdV);
    }
    store();
  }

 private:
  CUTE_DEVICE static Ring<Traits::kStages> before(Ring<Traits::kStages> const& ring) {
    bool const wraps = ring.stage == 0;
    return {wraps ? Traits::kStages - 1 : ring.stage - 1, ring.parity ^ uint32_t(wraps)};
  }

  // This warp's MMAs have read Q and dO of a stage.
  CUTE_DEVICE void release_queries(Ring<Traits::kStages> const& of) {
    arrive(shared.query_empty[of.stage]);
    arrive(shared.grad_o_empty[of.stage]);
  }

  // Tells another warp that this warp's MMAs have read a buffer, or that it has filled one.
  CUTE_DEVICE void arrive(uint64_t& barrier) {
    if (thread % 32 == 0) {
      Barrier::arrive(&barrier);
    }
  }

  // Starts S^T = K Q^T with the Q of `ring`.
  CUTE_DEVICE void start_scores(FragmentS& tSrS) {
    using namespace cute;
    typename Traits::MmaS mma;
    Tensor sK =
        make_tensor(make_smem_ptr(shared.k.data()), typename Traits::SmemLayoutK{});  // (N, D, 1)
    Tensor sQ = make_tensor(make_smem_ptr(shared.q.data()),
                            typename Traits::SmemLayoutQ{});  // (M, D, STAGE)
    auto const thread_mma = mma.get_slice(warpgroup * kWarpgroupThreads);
    Tensor tSrK = thread_mma.partition_fragment_A(sK);  // (MMA, MMA_N, MMA_D, 1)
    Tensor tSrQ = thread_mma.partition_fragment_B(sQ);  // (MMA, MMA_M, MMA_D, STAGE)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tSrK(_, _, _, 0), tSrQ(_, _, _, ring.stage), tSrS);
  }

  // Starts dP^T + delta = V dO^T + delta, in accumulators that contain delta.
  CUTE_DEVICE void start_grad_p(FragmentS& tdPrdP) {
    using namespace cute;
    typename Traits::MmaS mma;
    Tensor sV =
        make_tensor(make_smem_ptr(shared.v.data()), typename Traits::SmemLayoutV{});  // (N, DV, 1)
    Tensor sdO = make_tensor(make_smem_ptr(shared.grad_o.data()),
                             typename Traits::SmemLayoutGradO{});  // (M, DV, STAGE)
    auto const thread_mma = mma.get_slice(warpgroup * kWarpgroupThreads);
    Tensor tdPrV = thread_mma.partition_fragment_A(sV);    // (MMA, MMA_N, MMA_DV, 1)
    Tensor tdPrdO = thread_mma.partition_fragment_B(sdO);  // (MMA, MMA_M, MMA_DV, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdPrV(_, _, _, 0), tdPrdO(_, _, _, ring.stage), tdPrdP);
  }

  // Starts dV += P^T dO.
  CUTE_DEVICE void start_grad_v(Operand const& tdVrP) {
    using namespace cute;
    typename Traits::MmaV mma;
    Tensor sdOt = make_tensor(make_smem_ptr(shared.grad_o.data()),
                              typename Traits::SmemLayoutGradOt{});  // (DV, M, STAGE)
    Tensor tdVrdO = mma.get_slice(0).partition_fragment_B(sdOt);     // (MMA, MMA_DV, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdVrP, tdVrdO(_, _, _, ring.stage), tdVrdV);
  }

  // Starts dK += dS^T Q.
  CUTE_DEVICE void start_grad_k(Operand const& tdKrdS) {
    using namespace cute;
    typename Traits::MmaK mma;
    Tensor sQt = make_tensor(make_smem_ptr(shared.q.data()),
                             typename Traits::SmemLayoutQt{});  // (D, M, STAGE)
    Tensor tdKrQ = mma.get_slice(0).partition_fragment_B(sQt);  // (MMA, MMA_D, MMA_M, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdKrdS, tdKrQ(_, _, _, ring.stage), tdKrdK);
  }

  // Starts this warpgroup's part of dQ = dS K. dS of all keys must be there.
  CUTE_DEVICE void start_grad_q(FragmentQ& tdQrdQ) {
    using namespace cute;
    typename Traits::MmaQ mma;
    Tensor sdS = make_tensor(make_smem_ptr(shared.grad_s.data()),
                             typename Traits::SmemLayoutS{});  // (M, N, STAGE)
    Tensor sKt =
        make_tensor(make_smem_ptr(shared.k.data()), typename Traits::SmemLayoutKt{});  // (D, N, 1)
    Tensor sdS_part = local_tile(sdS, Shape<Int<kWarpgroupM>, Int<kTileN>>{},
                                 make_coord(warpgroup % Traits::kRowPartsQ, _0{}, ring_s.stage));
    Tensor sKt_part = local_tile(sKt, Shape<Int<Traits::kColsQ>, Int<kTileN>>{},
                                 make_coord(warpgroup / Traits::kRowPartsQ, _0{}, _0{}));
    auto const thread_mma = mma.get_slice(0);
    Tensor tdQrdS = thread_mma.partition_fragment_A(sdS_part);  // (MMA, MMA_M, MMA_N)
    Tensor tdQrK = thread_mma.partition_fragment_B(sKt_part);   // (MMA, MMA_D, MMA_N)
    start_gemm<GMMA::ScaleOut::Zero>(mma, tdQrdS, tdQrK, tdQrdQ);
  }

  // This thread's part of `numbers` (M), one number for each query, as if it were an accumulator of
  // S^T: (MMA, MMA_N, MMA_M).
  CUTE_DEVICE auto row_numbers(float const* numbers) const {
    using namespace cute;
    return typename Traits::MmaS{}
        .get_slice(opaque(thread))
        .partition_C(
            make_tensor(make_smem_ptr(numbers), typename Traits::SmemLayoutRow{}));  // (N, M)
  }

  // One step. dV and dK of the step before, if there was one, may be under way.
  CUTE_DEVICE void compute_step(Step const& step, int index) {
    using namespace cute;
    FragmentS tSrS;    // (MMA, MMA_N, MMA_M): S^T, then P^T
    FragmentS tdPrdP;  // (MMA, MMA_N, MMA_M): dP^T + delta, then dS^T
    Operand tdVrP;     // (MMA, MMA_N, MMA_M / 16)
    Operand tdKrdS;    // (MMA, MMA_N, MMA_M / 16)
    Barrier::wait(&shared.query_full[ring.stage], ring.parity);
    start_scores(tSrS);
    warpgroup_wait<1>();
    if (index > 0) {
      release_queries(before(ring));
    }
    Barrier::wait(&shared.grad_o_full[ring.stage], ring.parity);
    copy(row_numbers(shared.delta[ring.stage]), tdPrdP);
    start_grad_p(tdPrdP);
    warpgroup_wait<1>();
    warpgroup_fence_operand(tSrS);
    Tensor tSsLse = row_numbers(shared.lse[ring.stage]);  // (MMA, MMA_N, MMA_M)
    Tensor sLse = make_tensor(tSsLse.data(), rows_and_columns(tSsLse.layout()));  // (KEYS, QUERIES)
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));        // (KEYS, QUERIES)
    Tensor rdP = make_tensor(tdPrdP.data(), rows_and_columns(tdPrdP.layout()));   // (KEYS, QUERIES)
    if constexpr (Scores::kMasksFirst) {
      mask(step, tSrS);
    }
    CUTE_UNROLL
    for (int query = 0; query < size<1>(rS); ++query) {
      scores.begin(rS(_, query), sLse(0, query));
    }
    if constexpr (!Scores::kMasksFirst) {
      mask(step, tSrS);
    }
    // dV is not started before dP is there: P in 16 bits then takes the place of P.
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdPrdP);
    CUTE_UNROLL
    for (int query = 0; query < size<1>(rS); ++query) {
      scores.finish(rS(_, query), rdP(_, query), sLse(0, query));
    }
    convert_into(tSrS, tdVrP);
    start_grad_v(tdVrP);
    convert_into(tdPrdP, tdKrdS);
    start_grad_k(tdKrdS);
    store_grad_s(tdKrdS);
    grad_queries(index);
    ring.advance();
    ring_s.advance();
  }

  // Sets hidden scores, and those of queries past the end of the sequence, to -infinity.
  CUTE_DEVICE void mask(Step const& step, FragmentS& tSrS) {
    if (tiles.masked(step.m_block)) {
      QueryPacking const packing = unpacked_queries();
      auto const scores_of_tile = make_score_tile_of_transpose<kTileM, kTileN>(
          typename Traits::MmaS{}, opaque(thread), tSrS, sequence, packing, step.m_block * kTileM,
          tile.n_block * kTileN);
      mask_scores_by_side(scores_of_tile);
      if ((step.m_block + 1) * kTileM > sequence.seqlen_q) {
        mask_missing_queries(scores_of_tile);
      }
    }
  }

  // Writes dS^T, as it is in registers for dK, where dQ reads it.
  CUTE_DEVICE void store_grad_s(Operand const& tdKrdS) {
    using namespace cute;
    Barrier::wait(&shared.grad_s_empty[ring_s.stage], ring_s.parity ^ 1);
    Tensor sdSt = make_tensor(make_smem_ptr(shared.grad_s.data()),
                              typename Traits::SmemLayoutSt{});  // (N, M, STAGE)
    auto const thread_copy = typename Traits::SmemCopyS{}.get_slice(opaque(thread));
    Tensor rdS = make_tensor(tdKrdS.data(), FragmentS{}.layout());      // (MMA, MMA_N, MMA_M)
    Tensor source = thread_copy.retile_S(rdS);                          // (COPY, COPY_N, COPY_M)
    Tensor target = thread_copy.partition_D(sdSt(_, _, ring_s.stage));  // (COPY, COPY_N, COPY_M)
    copy(typename Traits::SmemCopyS{}, source, target);
    cutlass::arch::fence_view_async_shared();  // before WGMMAs read what these lanes wrote
    __syncwarp();
    arrive(shared.grad_s_full[ring_s.stage]);
  }

  // Computes this warpgroup's part of dQ of the step number `index`, and hands it to the warp that
  // adds it to its sums.
  CUTE_DEVICE void grad_queries(int index) {
    using namespace cute;
    int const lane = thread % kWarpgroupThreads;
    FragmentQ tdQrdQ;     // (MMA, MMA_M, MMA_D)
    warpgroup_wait<0>();  // dV and dK: their operands make room for dQ
    Barrier::wait(&shared.grad_s_full[ring_s.stage], ring_s.parity);
    start_grad_q(tdQrdQ);
    warpgroup_wait<0>();
    warpgroup_fence_operand(tdQrdQ);
    arrive(shared.grad_s_empty[ring_s.stage]);
    Barrier::wait(&shared.grad_q_empty, (index & 1) ^ 1);
    auto* const staged =
        reinterpret_cast<float4*>(shared.grad_q) + warpgroup * (kWarpgroupM * Traits::kColsQ / 4);
    CUTE_UNROLL
    for (int v = 0; v < decltype(size(tdQrdQ))::value / 4; ++v) {
      staged[v * kWarpgroupThreads + lane] =
          make_float4(tdQrdQ(4 * v), tdQrdQ(4 * v + 1), tdQrdQ(4 * v + 2), tdQrdQ(4 * v + 3));
    }
    cutlass::arch::fence_view_async_shared();  // before the bulk copy reads what these lanes wrote
    __syncwarp();
    arrive(shared.grad_q_full);
  }

  // Writes dK, scaled, and dV.
  CUTE_DEVICE void store() {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    Tensor rdK = make_tensor(tdKrdK.data(), rows_and_columns(tdKrdK.layout()));  // (ROWS, COLS)
    Tensor rdV = make_tensor(tdVrdV.data(), rows_and_columns(tdVrdV.layout()));  // (ROWS, COLS)
    CUTE_UNROLL
    for (int i = 0; i < size(rdK); ++i) {
      rdK(i) *= params.scale;
    }
    int const lane = thread % kWarpgroupThreads;
    int const first = tile.n_block * kTileN + warpgroup * kWarpgroupM + row_of_thread(lane);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      int const key = first + 8 * row;
      bool const inside = key < sequence.seqlen_k;
      store_row(rdK(row, _),
                row_pointer(static_cast<Element*>(params.grad_k), params.grad_k_stride, tile.batch,
                            tile.head_kv, sequence.row_k + key),
                inside, params.head_dim, lane);
      store_row(rdV(row, _),
                row_pointer(static_cast<Element*>(params.grad_v), params.grad_v_stride, tile.batch,
                            tile.head_kv, sequence.row_k + key),
                inside, params.head_dim_v, lane);
    }
  }
};

}  // namespace cute_attention::sm90
