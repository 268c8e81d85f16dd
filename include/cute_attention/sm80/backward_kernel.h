// sm80/backward_kernel.h: the sm80 backward kernel: one CTA computes dK and dV of one block of keys
// of one kv head, or of a part of its steps, and adds to dQ what the block contributes.
//
// The CTA walks the tiles of queries that see the block, over all query heads that share the kv
// head. One step of the walk, from left to right in time:
//
//   cp.async |     |     | Q, dO(t+1)                                                             |
//   ... MMA      | S^T | barrier | dP^T          | dV own | dK own | barrier | dV, dK of others |
//   dQ ALU      | red |         | mask P = exp2 | dS     |                                     |
//
// "red" adds the dQ of the last step to its sums in global memory. "Own" is the part of P^T and
// dS^T that a warp has in registers; the parts of "others" it reads from shared memory. With one
// stage the first barrier stands before S^T. Then the copies of Q and dO of step t + 1 can only
// start when all products that read Q and dO of step t are done: behind another barrier, before dQ.
// A bias takes two barriers more (backward_bias.h).
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/core/pending_sums.h"
#include "cute_attention/sm80/backward_load.h"
#include "cute_attention/sm80/backward_operand.h"
#include "cute_attention/sm80/backward_places.h"
#include "cute_attention/sm80/backward_store.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/gemm.h"

namespace cute_attention::sm80 {

template <class Row>
struct BackwardKernel : BackwardPlaces<Row> {
  using Traits = BackwardTraits<Row>;
  using Places = BackwardPlaces<Row>;
  using Operands = BackwardOperands<Traits>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Tiles = typename Traits::Tiles;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kAhead = Traits::Study::kFragmentsAhead;

  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using typename Places::Scores;
  using typename Places::Step;
  using Sums = KeyGradientSums<Traits, Traits::kThreads>;

  using Places::n_begin;
  using Places::params;
  using Places::parts;
  using Places::range;
  using Places::sequence;
  using Places::shared;
  using Places::thread;
  using Places::tile;
  using Places::tiles;
  int const warp_column;  // of this warp, in the grid of kWarpsN x kWarpsM warps
  Scores const scores;

  BackwardAddresses<Traits> const addresses;
  BackwardLoad<Traits> const load;

  PendingSums<Traits::kThreads, kHeadDim / 16> sums;  // one share for each K block of S^T

  CUTE_DEVICE BackwardKernel(BackwardParams const& params, SharedMemory& shared,
                             GradTile const& tile, StepParts const& parts)
      : Places(params, shared, tile, parts),
        warp_column(warp_uniform(int(threadIdx.x) / (32 * Traits::kWarpsN))),
        scores(params),
        addresses(shared, uint32_t(threadIdx.x)),
        load(params, shared, sequence, tile.batch, int(threadIdx.x)) {}

  CUTE_DEVICE void run() {
    using namespace cute;
    if (n_begin >= sequence.seqlen_k) {
      return;  // the sequence is shorter than the longest, which the grid was made for
    }
    typename Traits::TiledMmaKV mma;
    auto tdKrdK =
        partition_fragment_C(mma, Shape<Int<kTileN>, Int<kHeadDim>>{});  // (MMA, MMA_N, MMA_D)
    auto tdVrdV =
        partition_fragment_C(mma, Shape<Int<kTileN>, Int<kHeadDimV>>{});  // (MMA, MMA_N, MMA_DV)
    CUTE_STATIC_ASSERT_V(size<1>(tdKrdK) == size<1>(tdVrdV));
    clear(tdKrdK);
    clear(tdVrdV);
    if (range.count > 0) {
      compute(tdKrdK, tdVrdV);
    }
    if (parts == 1) {
      store_key_gradients<Traits>(params, shared, tile, sequence, thread, tdKrdK, tdVrdV);
    } else if (range.count > 0) {
      using Mma = typename Traits::TiledMmaKV;
      Sums::template store<Mma, Mma>(params, sequence, tile, thread, tdKrdK, tdVrdV);
    }
  }

  // Waits at a barrier until all threads' copies have landed.
  CUTE_DEVICE static void await_loads() {
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  // Waits at a barrier until all warps have written P and dS to shared memory, and with two stages
  // also until Q and dO of the next step have landed.
  CUTE_DEVICE static void await_scores() {
    if constexpr (kStages == 2) {
      cute::cp_async_wait<0>();
    }
    __syncthreads();
  }

  // Walks the tiles of queries.
  //   tdKrdK  (MMA, MMA_N, MMA_D)    tdVrdV  (MMA, MMA_N, MMA_DV)
  template <class GradK, class GradV>
  CUTE_DEVICE void compute(GradK& tdKrdK, GradV& tdVrdV) {
    using namespace cute;
    BackwardSteps<Element, kTileM> const steps(params, tile, sequence, tiles, range);
    // warp_uniform() is not needed for its value, which is uniform already. Without it ptxas keeps
    // addresses that depend on the stage in registers of their own, and
    // spills at head dim 128.
    int const count = warp_uniform(steps.count());
    Step step = steps.first();
    auto tdQrdQ = partition_fragment_C(typename Traits::TiledMmaQ{},  // (MMA, MMA_M, MMA_D)
                                       Shape<Int<kTileM>, Int<kHeadDim>>{});
    load.keys(tile, n_begin);
    load.queries(step, 0);
    Places::load_bias(step);
    if constexpr (kStages == 2) {
      await_loads();
    }
    for (int t = 0; t < count; ++t) {
      Step next = step;
      steps.advance(next);
      int const stage = kStages == 1 ? 0 : t % 2;
      if constexpr (kStages == 1) {
        await_loads();  // at this barrier all threads are also done with the last step
      }
      grad_keys(step, stage, tdKrdK, tdVrdV, tdQrdQ, [&] {
        if constexpr (kStages == 2) {
          __syncthreads();  // all threads are done with the last step
          if (t + 1 < count) {
            load.queries(next, 1 - stage);
          }
        }
      });
      if (kStages == 1) {
        __syncthreads();  // all threads are done with Q and dO
        if (t + 1 < count) {
          load.queries(next, 0);
        }
      } else if (Scores::kTermsInScores) {
        __syncthreads();  // all threads are done with P
      }
      if (t + 1 < count) {
        Places::load_bias(next);
      }
      grad_queries(step, tdQrdQ);
      step = next;
    }
    sums.finish(tdQrdQ, thread);
  }

  // dV += P^T dO and dK += dS^T Q of one step, where dS = P (dP + delta) is not scaled yet.
  //   load_next()  starts the copies into the other stage
  //   tdQrdQ       (MMA, MMA_M, MMA_D)  dQ of the last step, which is added to its sums
  template <class GradK, class GradV, class GradQ, class LoadNext>
  CUTE_DEVICE void grad_keys(Step const& step, int stage, GradK& tdKrdK, GradV& tdVrdV,
                             GradQ const& tdQrdQ, LoadNext&& load_next) {
    using namespace cute;
    typename Traits::TiledMmaS mma;
    auto tSrS =
        partition_fragment_C(mma, Shape<Int<kTileN>, Int<kTileM>>{});  // (MMA, MMA_N, MMA_M)
    auto tdPrdP =
        partition_fragment_C(mma, Shape<Int<kTileN>, Int<kTileM>>{});  // (MMA, MMA_N, MMA_M)
    CUTE_STATIC_ASSERT_V(size<1>(tSrS) == size<1>(tdKrdK), "a warp has the same keys in both");
    sums.await();
    multiply_keys(stage, tSrS, tdQrdQ);
    multiply_values(step, stage, tSrS, tdPrdP, load_next);
    auto& tPrP = tSrS;  // add_own_part() completes P^T and dS^T in place
    auto& tdSrdS = tdPrdP;
    add_own_part(step, stage, tPrP, tdSrdS, tdKrdK, tdVrdV);
    add_other_parts(stage, tdKrdK, tdVrdV);
  }

  // S^T = K Q^T. Between its MMAs the dQ of the last step is added to its sums.
  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class ScoresT, class GradQ>
  CUTE_DEVICE void multiply_keys(int stage, ScoresT& tSrS, GradQ const& tdQrdQ) {
    using namespace cute;
    clear(tSrS);
    gemm_smem<kAhead>(
        typename Traits::TiledMmaS{}, typename Operands::K(addresses.k, offsetof(Tiles, k)),
        typename Operands::Q(addresses.q + stage * sizeof(shared.q[0]), offsetof(Tiles, q)), tSrS,
        [&](int k) { sums.add(tdQrdQ, k, thread); });
  }

  // dP^T + delta = V dO^T + delta, in accumulators that start with delta. Between its MMAs
  // scores.begin() makes of S^T what it can without dP: P^T, or with a modifier modified scores.
  // load_next() runs after the first loads of the product: warps are no longer in step there, so
  // one warp computes addresses while another's MMAs run.
  //   tSrS, tdPrdP  (MMA, MMA_N, MMA_M)
  template <class ScoresT, class LoadNext>
  CUTE_DEVICE void multiply_values(Step const& step, int stage, ScoresT& tSrS, ScoresT& tdPrdP,
                                   LoadNext&& load_next) {
    using namespace cute;
    add_terms(step, tSrS);
    auto product = smem_product<typename Traits::TiledMmaS, kAhead>(
        typename Operands::V(addresses.k, offsetof(Tiles, v)),
        typename Operands::GradO(addresses.q + stage * sizeof(shared.grad_o[0]),
                                 offsetof(Tiles, grad_o)));
    Tensor tdPsDelta = row_numbers(shared.delta[stage]);  // (MMA, MMA_N, MMA_M)
    CUTE_STATIC_ASSERT_V(size(tdPrdP) == size(tdPsDelta));
    CUTE_UNROLL
    for (int i = 0; i < size(tdPrdP); ++i) {
      tdPrdP(i) = tdPsDelta(i);
    }
    load_next();
    if constexpr (Scores::kMasksFirst) {
      Places::mask_all(step, tSrS);
    }
    Tensor tSsLse = row_numbers(shared.lse[stage]);  // (MMA, MMA_N, MMA_M)
    Tensor sLse = make_tensor(tSsLse.data(), rows_and_columns(tSsLse.layout()));  // (KEYS, QUERIES)
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));        // (KEYS, QUERIES)
    CUTE_STATIC_ASSERT_V(size<0>(rS) == size<0>(sLse));
    CUTE_STATIC_ASSERT_V(size<1>(rS) == size<1>(sLse));
    bool const near = scores.all_near(rS);
    auto const terms = Places::terms_of(step, tSrS);
    constexpr int kQueries = decltype(size<1>(rS))::value;
    constexpr int kBlocks = kHeadDimV / 16;
    product.add_to(tdPrdP, [&](int k) {
      CUTE_UNROLL
      for (int query = 0; query < kQueries; ++query) {
        if (query * kBlocks / kQueries != k) {
          continue;  // its turn comes after another K block
        }
        scores.begin(rS(_, query), near, sLse(0, query), terms.of_query(query));
      }
    });
    if constexpr (!Scores::kMasksFirst && !Scores::kModifiesCopies) {
      Places::mask_all(step, tSrS);
    }
  }

  // Adds the bias of a step to its scores.
  //   tSrS  (MMA, MMA_N, MMA_M)
  template <class ScoresT>
  CUTE_DEVICE void add_terms(Step const& step, ScoresT& tSrS) {
    if constexpr (Scores::kTermsInScores && !Scores::kModifiesCopies) {
      Places::add_bias(step, tSrS, [] {
        if constexpr (kStages == 2) {
          await_loads();
        }
      });
      if constexpr (kStages == 1) {
        __syncthreads();  // all threads have read the bias, whose place P takes
      }
    }
  }

  // This thread's part of `numbers` (M), one number for each query, as if it were an accumulator of
  // S^T: (MMA, MMA_N, MMA_M).
  CUTE_DEVICE auto row_numbers(float const* numbers) const {
    using namespace cute;
    typename Traits::TiledMmaS mma;
    return mma.get_slice(thread).partition_C(
        make_tensor(make_smem_ptr(numbers), typename Traits::SmemLayoutRow{}));  // (N, M)
  }

  // dV += P^T dO and dK += dS^T Q with this warp's own part of P^T and dS^T, from registers. Right
  // before the first MMAs of a K block, scores.finish() completes P^T and dS^T of the block; then
  // they are rounded, and written to shared memory for other warps and for dQ.
  //   tPrP    (MMA, MMA_N, MMA_M)  what scores.begin() left, becomes P^T
  //   tdSrdS  (MMA, MMA_N, MMA_M)  dP^T + delta, becomes dS^T
  template <class ScoresT, class GradK, class GradV>
  CUTE_DEVICE void add_own_part(Step const& step, int stage, ScoresT& tPrP, ScoresT& tdSrdS,
                                GradK& tdKrdK, GradV& tdVrdV) {
    using namespace cute;
    typename Traits::TiledMmaKV mma;
    Tensor sP =  // (N, M)
        make_tensor(make_smem_ptr(shared.p.data()), typename Traits::SmemLayoutP{});
    Tensor sdS =  // (N, M)
        make_tensor(make_smem_ptr(shared.grad_s.data()), typename Traits::SmemLayoutP{});
    // The same registers as A operands of the two products.
    Tensor tdVrP =  // (MMA, MMA_N, MMA_M / 2)
        make_tensor(tPrP.data(), as_a_operand(tPrP.layout()));
    Tensor tdKrdS =  // (MMA, MMA_N, MMA_M / 2)
        make_tensor(tdSrdS.data(), as_a_operand(tdSrdS.layout()));
    Tensor tSsLse = row_numbers(shared.lse[stage]);  // (MMA, MMA_N, MMA_M)
    Tensor sLse =                                    // (MMA, MMA_N, MMA_M / 2)
        make_tensor(tSsLse.data(), as_a_operand(tSsLse.layout()));
    Tensor tdPsDelta = row_numbers(shared.delta[stage]);  // (MMA, MMA_N, MMA_M)
    Tensor sDelta =                                       // (MMA, MMA_N, MMA_M / 2)
        make_tensor(tdPsDelta.data(), as_a_operand(tdPsDelta.layout()));
    auto const thread_mma_s = typename Traits::TiledMmaS{}.get_slice(thread);
    Tensor tPsP = thread_mma_s.partition_C(sP);           // (MMA, MMA_N, MMA_M)
    Tensor tdSsdS = thread_mma_s.partition_C(sdS);        // (MMA, MMA_N, MMA_M)
    auto tdKrdS16 = make_tensor<Element>(shape(tdKrdS));  // (MMA, MMA_N, MMA_M / 2)
    CUTE_STATIC_ASSERT_V(size<1>(tdVrP) == size<1>(tdVrdV));
    CUTE_STATIC_ASSERT_V(size<1>(tdKrdS) == size<1>(tdKrdK));
    CUTE_STATIC_ASSERT_V(size<2>(tdVrP) * _2{} == size<2>(tPsP));
    CUTE_STATIC_ASSERT_V(size<2>(tdKrdS) * _2{} == size<2>(tdSsdS));
    CUTE_STATIC_ASSERT_V(size<2>(tdVrP) == size<2>(sLse));
    auto const terms = Places::terms_of(step, tPrP);
    auto const finish_block = [&](int k) {
      Tensor p = operand_rows(tdVrP(_, _, k));    // (KEYS, QUERIES)
      Tensor ds = operand_rows(tdKrdS(_, _, k));  // (KEYS, QUERIES)
      Tensor lse = operand_rows(sLse(_, _, k));   // (KEYS, QUERIES)
      CUTE_STATIC_ASSERT_V(size<0>(p) == size<0>(ds));
      CUTE_STATIC_ASSERT_V(size<1>(p) == size<1>(lse));
      Places::drop_gradients(step, stage, k, tPrP, tdKrdS(_, _, k), sDelta(_, _, k));
      if constexpr (Scores::kModifiesCopies) {
        auto copies = make_tensor<float>(  // (MMA, MMA_N, 2)
            make_shape(shape<0>(tPrP), shape<1>(tPrP), _2{}));
        Places::modify_copies(step, k, tPrP, copies);
        Tensor modified = operand_rows(  // (KEYS, QUERIES)
            make_tensor(copies.data(), as_a_operand(copies.layout()))(_, _, _0{}));
        CUTE_STATIC_ASSERT_V(shape(modified) == shape(p));
        CUTE_UNROLL
        for (int i = 0; i < size(p); ++i) {
          ds(i) *= scores.factor(p(i), modified(i), lse(0, i / size<0>(p)));
        }
      } else {
        CUTE_UNROLL
        for (int query = 0; query < size<1>(p); ++query) {
          scores.finish(p(_, query), ds(_, query), lse(0, query),
                        terms.of_query(k * size<1>(p) + query));
        }
      }
      Tensor ds16 = tdKrdS16(_, _, k);                         // (MMA, MMA_N)
      auto p16 = make_tensor<Element>(shape(tdVrP(_, _, k)));  // (MMA, MMA_N)
      round_into(tdKrdS(_, _, k), ds16);
      round_into(tdVrP(_, _, k), p16);
      Places::drop_probabilities(step, stage, k, tPrP, p16);
      store_operand_block(ds16, tdSsdS, k);
      if constexpr (Traits::kWarpsM > 1) {
        store_operand_block(p16, tPsP, k);
      }
      return p16;
    };
    gemm_register_a<kAhead>(mma, finish_block, addresses.part_of_grad_o(stage, warp_column),
                            tdVrdV);
    gemm_register_a<kAhead>(
        mma, [&](int k) { return tdKrdS16(_, _, k); }, addresses.part_of_q(stage, warp_column),
        tdKrdK);
  }

  // dV += P^T dO and dK += dS^T Q with the parts of P^T and dS^T that the other warps with the same
  // keys have written to shared memory.
  template <class GradK, class GradV>
  CUTE_DEVICE void add_other_parts(int stage, GradK& tdKrdK, GradV& tdVrdV) {
    using namespace cute;
    typename Traits::TiledMmaKV mma;
    if constexpr (Traits::kWarpsM == 1) {
      await_scores();
      sums.end(thread);
    } else {
      int other = Operands::column_after(warp_column, 1);
      Tensor tdVrdO =  // (MMA, MMA_DV, MMA_M)
          load_operand_b(mma, addresses.part_of_grad_o(stage, other));
      await_scores();
      sums.end(thread);
      gemm_register_b(mma, addresses.part_of_p(other), tdVrdO, tdVrdV);
      gemm_smem<kAhead>(mma, addresses.part_of_grad_s(other), addresses.part_of_q(stage, other),
                        tdKrdK);
      CUTE_UNROLL
      for (int i = 2; i < Traits::kWarpsM; ++i) {
        other = Operands::column_after(warp_column, i);
        gemm_smem<kAhead>(mma, addresses.part_of_p(other), addresses.part_of_grad_o(stage, other),
                          tdVrdV);
        gemm_smem<kAhead>(mma, addresses.part_of_grad_s(other), addresses.part_of_q(stage, other),
                          tdKrdK);
      }
    }
  }

  // dQ = dS K of this block of keys, not scaled yet; it waits in registers to be added to its sums.
  //   tdQrdQ  (MMA, MMA_M, MMA_D)
  template <class GradQ>
  CUTE_DEVICE void grad_queries(Step const& step, GradQ& tdQrdQ) {
    using namespace cute;
    sums.block = params.grad_q_sum + step.grad_q_block * (kTileM * kHeadDim);
    if (params.grad_q_turn != nullptr) {
      KvTiles const keys = kv_tiles(sequence, step.m_block * kTileM, kTileM, kTileN);
      sums.set_turn(params.grad_q_turn + step.grad_q_block, tile.n_block - keys.begin);
    }
    clear(tdQrdQ);
    gemm_smem<kAhead>(typename Traits::TiledMmaQ{},
                      typename Operands::Pt(addresses.pt, offsetof(Tiles, grad_s)),
                      typename Operands::Kt(addresses.kt, offsetof(Tiles, k)), tdQrdQ);
  }
};

}  // namespace cute_attention::sm80
