// sm90/grad_q_compute.h: what a consumer warpgroup of the kernel for dQ does: dQ of its 64 queries.
// In step n, from left to right:
//
//   products of the tensor cores   S(n)   dP(n)           dQ(n)   S(n-1)
//   pointwise work                        P(n)    dS(n)
//
// While one warpgroup computes dS, the tensor cores work for the other.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/sm90/bias_words.h"
#include "cute_attention/sm90/gemm.h"
#include "cute_attention/sm90/grad_q_traits.h"
#include "cute_attention/sm90/row_numbers.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradQCompute {
  using Traits = GradQTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Scores = BackwardScores<kScoreMods>;
  // With the terms that stand beside words of the bias.
  using OtherScores = BackwardScores<kScoreMods, score_mods::Bias>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;

  template <class Mma, int kCols>
  using Fragment = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kCols>>{}));
  using FragmentS = Fragment<typename Traits::MmaS, kTileN>;
  using FragmentQ = Fragment<typename Traits::MmaQ, kHeadDim>;
  using Operand = decltype(cute::make_tensor<Element>(as_a_operand(FragmentS{}.layout())));
  using Bias = BiasWords<WordsOfScores, cute::size(FragmentS{}) / 2, kTileN>;

  BackwardArguments const& arguments;
  SharedMemory& shared;
  int const warpgroup;  // of the consumers
  int const thread;     // of the warpgroup
  Scores const scores;

  FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D)
  RowNumbers<kScoreMods> rows;
  int32_t steps = 0;  // of all tiles before this step
  Ring<1> ring_q{};

  CUTE_DEVICE GradQCompute(BackwardArguments const& arguments, SharedMemory& shared, int warpgroup,
                           int thread)
      : arguments(arguments),
        shared(shared),
        warpgroup(warpgroup),
        thread(thread),
        scores(arguments.params) {}

  CUTE_DEVICE void run() {
    for (Ring<kWorkSlots> slot{};; slot.advance()) {
      Barrier::wait(&shared.work_full[slot.stage], slot.parity);
      GradQWork const& work = shared.works[slot.stage];
      if (work.is_end()) {
        break;
      }
      cute::clear(tdQrdQ);
      if (work.kv.begin < work.kv.end) {
        compute_queries(work);
      }
      store(work);
      __syncwarp();  // all lanes have read the work
      arrive_by_warp(shared.work_empty[slot.stage]);
    }
  }

 private:
  CUTE_DEVICE int first_query(GradQWork const& work) const {
    return work.tile.m_block * kTileM + warpgroup * kWarpgroupM;
  }

  CUTE_DEVICE void compute_queries(GradQWork const& work) {
    rows.load(arguments.params, work.sequence, work.tile.batch, work.tile.head,
              first_query(work) + row_of_thread(thread));
    Barrier::wait(&shared.query_full, ring_q.parity);
    Barrier::wait(&shared.grad_o_full, ring_q.parity);
    int32_t n_block = work.kv.end - 1;
    do {
      step(work, n_block);
      ++steps;
    } while (--n_block >= work.kv.begin);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tdQrdQ);
    arrive_by_warp(shared.query_empty);
    arrive_by_warp(shared.grad_o_empty);
    ring_q.advance();
  }

  // Starts S = Q K^T, or dP = dO V^T.
  //   tCrC  (MMA, MMA_M, MMA_N)
  template <class Mma, class LayoutA, class LayoutB, class A, class B>
  CUTE_DEVICE void start_scores(A& a, B& b, uint32_t stage, FragmentS& tCrC) const {
    using namespace cute;
    Tensor sA = in_shared<LayoutA>(a);  // (64, D, WARPGROUP)
    Tensor sB = in_shared<LayoutB>(b);  // (N, D, STAGE)
    auto const thread_mma = Mma{}.get_slice(0);
    Tensor tCrA = thread_mma.partition_fragment_A(sA);  // (MMA, MMA_M, MMA_D, WARPGROUP)
    Tensor tCrB = thread_mma.partition_fragment_B(sB);  // (MMA, MMA_N, MMA_D, STAGE)
    start_gemm<GMMA::ScaleOut::Zero>(Mma{}, tCrA(_, _, _, warpgroup), tCrB(_, _, _, stage), tCrC);
  }

  // Starts dQ += dS K.
  CUTE_DEVICE void start_grad_q(Operand const& tdQrdS, uint32_t stage) {
    using namespace cute;
    typename Traits::MmaQ mma;
    Tensor sKt = in_shared<typename Traits::SmemLayoutKt>(shared.k);  // (D, N, STAGE)
    Tensor tdQrK = mma.get_slice(0).partition_fragment_B(sKt);        // (MMA, MMA_D, MMA_N, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tdQrdS, tdQrK(_, _, _, stage), tdQrdQ);
  }

  // One step. dQ of the step before is under way.
  CUTE_DEVICE void step(GradQWork const& work, int32_t n_block) {
    using namespace cute;
    FragmentS tSrS;    // (MMA, MMA_M, MMA_N): S, then P
    FragmentS tdPrdP;  // (MMA, MMA_M, MMA_N): dP, then dS
    Operand tdQrdS;    // (MMA, MMA_M, MMA_N / 16)
    auto const ring_k = buffer_of<Traits::kStagesK>(steps);
    auto const ring_v = buffer_of<Traits::kStagesV>(steps);
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));       // (ROWS, COLS)
    Tensor rdP = make_tensor(tdPrdP.data(), rows_and_columns(tdPrdP.layout()));  // (ROWS, COLS)
    Barrier::wait(&shared.key_full[ring_k.stage], ring_k.parity);
    start_scores<typename Traits::MmaS, typename Traits::SmemLayoutQ, typename Traits::SmemLayoutK>(
        shared.q, shared.k, ring_k.stage, tSrS);
    Bias bias;
    if constexpr (Scores::kTermsInScores) {
      bias.load(arguments.params, arguments.bias_is_aligned, head_terms(work).data,
                first_query(work), n_block * kTileN, opaque(thread));
    }
    warpgroup_wait<1>();  // dQ of the step before
    if (steps > 0) {
      arrive_by_warp(shared.key_empty[buffer_of<Traits::kStagesK>(steps - 1).stage]);
    }
    Barrier::wait(&shared.value_full[ring_v.stage], ring_v.parity);
    start_scores<typename Traits::MmaP, typename Traits::SmemLayoutGradO,
                 typename Traits::SmemLayoutV>(shared.grad_o, shared.v, ring_v.stage, tdPrdP);
    warpgroup_wait<1>();  // S
    warpgroup_fence_operand(tSrS);
    if constexpr (Scores::kTermsInScores && !Scores::kModifiesCopies) {
      if (bias.are_there) {
        bias.template add<Element>(
            bias_per_unit(arguments.params, work.sequence, arguments.params.scale), tSrS);
      } else {
        QueryPacking const packing = unpacked_queries();
        Scores::template add_terms<Element>(arguments.params, head_terms(work),
                                            score_tile(work, n_block, tSrS, packing));
      }
    }
    if constexpr (Scores::kMasksFirst) {
      mask(work, n_block, tSrS);
    }
    auto const terms = terms_of(work, n_block, tSrS);
    if constexpr (Scores::Modifiers::kHasMap) {
      constexpr int kCols = decltype(size<1>(rS))::value;
      scores.template map_all<Scores::kModifiesCopies ? 4 : kCols>(rS);
    } else {
      CUTE_UNROLL
      for (int row = 0; row < 2; ++row) {
        scores.begin(rS(row, _), true, rows.lse[row], terms.of_query(row));
      }
    }
    if constexpr (Scores::kModifiesCopies) {
      take_factors(work, n_block, bias, tSrS);
    } else if constexpr (!Scores::kMasksFirst) {
      mask(work, n_block, tSrS);
    }
    warpgroup_wait<0>();  // dP
    warpgroup_fence_operand(tdPrdP);
    arrive_by_warp(shared.value_empty[ring_v.stage]);
    QueryPacking const packing = unpacked_queries();
    rows.drop(arguments.params, [&] { return score_tile(work, n_block, tSrS, packing); }, tdPrdP);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < size<1>(rdP); ++col) {
        rdP(row, col) += rows.delta[row];
      }
      if constexpr (Scores::kModifiesCopies) {
        CUTE_UNROLL
        for (int col = 0; col < size<1>(rdP); ++col) {
          rdP(row, col) *= rS(row, col);
        }
      } else {
        scores.finish(rS(row, _), rdP(row, _), rows.lse[row], terms.of_query(row));
      }
    }
    convert_into(tdPrdP, tdQrdS);
    start_grad_q(tdQrdS, ring_k.stage);
  }

  // With kModifiesCopies (backward_scores.h): makes mapped scores what dP + delta is multiplied
  // with, of one block of 16 keys after the other. Nobody needs P here.
  //   tSrS  (MMA, MMA_M, MMA_N)
  CUTE_DEVICE void take_factors(GradQWork const& work, int32_t n_block, Bias& bias,
                                FragmentS& tSrS) const {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    QueryPacking const packing = unpacked_queries();
    auto const tile = score_tile(work, n_block, tSrS, packing);
    float const unit = Scores::Modifiers::exponent_scale(params);
    CUTE_UNROLL
    for (int k = 0; k < size(tSrS) / 8; ++k) {
      Tensor rZ = make_tensor<float>(Int<8>{});  // (8), in the order of the accumulator
      auto const copies = copies_of_scores<2, 4>(tile, 0, 4 * k, rZ);
      if (bias.are_there) {
        bias.template add<Element>(bias_per_unit(params, work.sequence, unit), rZ, 4 * k);
        OtherScores::template add_terms<Element>(
            params, OtherScores::of_head(params, work.tile.batch, work.tile.head), copies);
      } else {
        Scores::template add_terms<Element>(params, head_terms(work), copies);
      }
      if (work.kv.masked(n_block)) {
        mask_scores_by_side(copies);
      }
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        float probability = tSrS(8 * k + i);
        tSrS(8 * k + i) = scores.factor(probability, rZ(i), rows.lse[i / 2 % 2]);
      }
    }
  }

  CUTE_DEVICE auto head_terms(GradQWork const& work) const {
    return Scores::of_head(arguments.params, work.tile.batch, work.tile.head);
  }

  CUTE_DEVICE auto score_tile(GradQWork const& work, int32_t n_block, FragmentS& tSrS,
                              QueryPacking const& packing) const {
    return make_score_tile<kWarpgroupM, kTileN>(typename Traits::MmaS{}, opaque(thread), tSrS,
                                                work.sequence, packing, first_query(work),
                                                n_block * kTileN);
  }

  // The terms of the modifiers for a step, for scores.begin() and scores.finish().
  CUTE_DEVICE auto terms_of(GradQWork const& work, int32_t n_block, FragmentS& tSrS) const {
    QueryPacking const packing = unpacked_queries();
    return Scores::terms(head_terms(work),
                         [&] { return score_tile(work, n_block, tSrS, packing); });
  }

  // Sets hidden scores to -infinity.
  CUTE_DEVICE void mask(GradQWork const& work, int32_t n_block, FragmentS& tSrS) const {
    if (work.kv.masked(n_block)) {
      QueryPacking const packing = unpacked_queries();
      mask_scores_by_side(score_tile(work, n_block, tSrS, packing));
    }
  }

  // Writes dQ, scaled: it is the gradient of unscaled queries.
  CUTE_DEVICE void store(GradQWork const& work) {
    BackwardParams const& params = arguments.params;
    CUTE_UNROLL
    for (int i = 0; i < cute::size(tdQrdQ); ++i) {
      tdQrdQ(i) *= grad_qk_scale(params);
    }
    int const first = first_query(work);
    store_rows(tdQrdQ,
               row_pointer(static_cast<Element*>(params.grad_q), params.grad_q_stride,
                           work.tile.batch, work.tile.head, work.sequence.row_q + first),
               params.grad_q_stride.row, work.sequence.seqlen_q - first, params.head_dim, thread);
  }
};

}  // namespace cute_attention::sm90
