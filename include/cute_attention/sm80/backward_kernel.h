// sm80/backward_kernel.h: the sm80 backward kernel: one CTA computes dK and dV of one block of keys
// of one kv head, and adds the block's share of dQ.
//
// It walks the tiles of queries that see the block, over all query heads that share the kv head:
//
//   cp.async |     | Q, dO(t+1)                                                             | ...
//   MMA      | S^T | barrier | dP^T          | dV own | dK own | barrier | dV, dK of others | dQ
//   ALU      | red |         | mask P = exp2 | dS     |                                     |
//
// red adds the last step's dQ. With one stage the first barrier stands before S^T, and Q, dO(t+1)
// follow the products that read Q, dO(t), behind a barrier and under dQ.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/pending_sums.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/sm80/backward_operand.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/copy.h"
#include "cute_attention/sm80/gemm.h"

namespace cute_attention::sm80 {

template <class Row>
struct BackwardKernel {
  using Traits = BackwardTraits<Row>;
  using Operands = BackwardOperands<Traits>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kPartM = Traits::kPartM;
  static constexpr int kStages = Traits::kStages;

  using Step = BackwardStep<Element>;

  BackwardParams const& params;
  SharedMemory& shared;
  GradTile const tile;
  Sequence const sequence;
  int const n_begin;  // first key of the block
  MTiles const tiles;
  int const thread;
  int const own;  // this warp's column in the grid of warps
  BackwardScores<Row::kKey.score_mod> const elements;

  BackwardAddresses<Traits> const addresses;
  float const* const numbers;  // LSE or delta: of which this thread copies one

  PendingSums<Traits::kThreads, kHeadDim / 16> sums;  // one share a K block of S^T

  CUTE_DEVICE BackwardKernel(BackwardParams const& params, SharedMemory& shared,
                             GradTile const& tile)
      : params(params),
        shared(shared),
        tile(tile),
        sequence(load_sequence(params, tile.batch)),
        n_begin(tile.n_block * kTileN),
        tiles(m_tiles(sequence, n_begin, kTileN, kTileM)),
        thread(int(threadIdx.x)),
        own(warp_uniform(int(threadIdx.x) / (32 * Traits::kWarpsN))),
        elements(params),
        addresses(shared, uint32_t(threadIdx.x)),
        numbers(params.delta + opaque(int(threadIdx.x) < kTileM ? lse_size(params) : 0)) {}

  // Inside the loop over steps, where addresses are computed anew.
  CUTE_DEVICE uint32_t unsigned_thread() const { return uint32_t(opaque(thread)); }

  CUTE_DEVICE void run() {
    using namespace cute;
    if (n_begin >= sequence.seqlen_k) {
      return;  // a shorter sequence than the grid was made for
    }
    typename Traits::TiledMmaKV mma;
    auto tKrK =
        partition_fragment_C(mma, Shape<Int<kTileN>, Int<kHeadDim>>{});  // (MMA, MMA_N, MMA_D)
    auto tVrV =
        partition_fragment_C(mma, Shape<Int<kTileN>, Int<kHeadDimV>>{});  // (MMA, MMA_N, MMA_D)
    clear(tKrK);
    clear(tVrV);
    if (tiles.begin < tiles.end) {
      compute(tKrK, tVrV);
    }
    store(tKrK, tVrV);
  }

  CUTE_DEVICE void load_keys() {
    using namespace cute;
    int64_t const row = sequence.row_k + n_begin;
    load_tile<true>(typename Traits::GmemCopyQK{},
                    head_tile<kTileN, kHeadDim>(static_cast<Element const*>(params.k),
                                                params.k_stride, tile.batch, tile.head_kv, row),
                    make_tensor(make_smem_ptr(shared.k.data()), typename Traits::SmemLayoutK{}),
                    sequence.seqlen_k - n_begin, params.head_dim, thread);
    load_tile<true>(typename Traits::GmemCopyV{},
                    head_tile<kTileN, kHeadDimV>(static_cast<Element const*>(params.v),
                                                 params.v_stride, tile.batch, tile.head_kv, row),
                    make_tensor(make_smem_ptr(shared.v.data()), typename Traits::SmemLayoutV{}),
                    sequence.seqlen_k - n_begin, params.head_dim_v, thread);
  }

  // Starts the copies of a step's Q, dO, LSE and delta. Rows past the end become zeros; their
  // scores are masked.
  CUTE_DEVICE void load_queries(Step const& step, int stage) {
    using namespace cute;
    int const rows = sequence.seqlen_q - step.m_block * kTileM;
    load_tile<true>(
        typename Traits::GmemCopyQK{}, gmem_tile<kTileM, kHeadDim>(step.q, params.q_stride.row),
        make_tensor(make_smem_ptr(shared.q[stage].data()), typename Traits::SmemLayoutQ{}), rows,
        params.head_dim, unsigned_thread());
    load_tile<true>(
        typename Traits::GmemCopyV{},
        gmem_tile<kTileM, kHeadDimV>(step.grad_o, params.grad_o_stride.row),
        make_tensor(make_smem_ptr(shared.grad_o[stage].data()), typename Traits::SmemLayoutGradO{}),
        rows, params.head_dim_v, unsigned_thread());
    int const query = opaque(thread) % kTileM;
    if (thread < 2 * kTileM) {
      bool const inside = query < rows;
      float const* source = numbers + step.row;
      float* target = thread < kTileM ? shared.lse[stage] : shared.delta[stage];
      SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(source[inside ? query : 0], target[query],
                                                   inside);
    }
    cp_async_fence();
  }

  // A barrier, behind which all see what any has loaded.
  CUTE_DEVICE static void await_loads() {
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  // A barrier, behind which all see P and dS, and with two stages the next step's Q and dO.
  CUTE_DEVICE static void await_scores() {
    if constexpr (kStages == 2) {
      cute::cp_async_wait<0>();
    }
    __syncthreads();
  }

  template <class GradK, class GradV>
  CUTE_DEVICE void compute(GradK& tKrK, GradV& tVrV) {
    using namespace cute;
    BackwardSteps<Element, kTileM> const steps(params, tile, sequence, tiles);
    int const count = steps.count();
    Step step = steps.first();
    auto tQrQ = partition_fragment_C(typename Traits::TiledMmaQ{},  // (MMA, MMA_M, MMA_D)
                                     Shape<Int<kTileM>, Int<kHeadDim>>{});
    load_keys();
    load_queries(step, 0);
    if constexpr (kStages == 2) {
      await_loads();
    }
    for (int t = 0; t < count; ++t) {
      Step next = step;
      steps.advance(next);
      int const stage = kStages == 1 ? 0 : t % 2;
      if constexpr (kStages == 1) {
        await_loads();  // and all are done with the last step
      }
      grad_keys(step, stage, tKrK, tVrV, tQrQ, [&] {
        if constexpr (kStages == 2) {
          __syncthreads();  // all are done with the last step
          if (t + 1 < count) {
            load_queries(next, 1 - stage);
          }
        }
      });
      if (kStages == 1) {
        __syncthreads();  // all are done with Q and dO
        if (t + 1 < count) {
          load_queries(next, 0);
        }
      }
      grad_queries(step, tQrQ);
      step = next;
    }
    sums.finish(tQrQ, thread);
  }

  // S^T = K Q^T; under it the last step's dQ is added.
  template <class Scores, class GradQ>
  CUTE_DEVICE void scores(int stage, Scores& tSrS, GradQ const& tQrQ) {
    using namespace cute;
    clear(tSrS);
    gemm_smem(
        typename Traits::TiledMmaS{}, typename Operands::K(addresses.k, offsetof(SharedMemory, k)),
        typename Operands::Q(addresses.q + stage * sizeof(shared.q[0]), offsetof(SharedMemory, q)),
        tSrS, [&](int k) { sums.add(tQrQ, k, thread); });
  }

  // Hidden scores, and those of queries past the end, become -infinity.
  template <class Scores>
  CUTE_DEVICE void mask(Step const& step, Scores& tSrS) const {
    using namespace cute;
    typename Traits::TiledMmaS mma;
    if (tiles.masked(step.m_block)) {
      Tensor cS = make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{});  // (M, N)
      Tensor tScS = mma.get_slice(opaque(thread))  // (MMA, MMA_N, MMA_M) of (query, key)
                        .partition_C(make_tensor(cS.data(), select<1, 0>(cS.layout())));
      auto const rows = rows_and_columns(tSrS.layout());
      auto const coords = rows_and_columns(tScS.layout());
      Tensor rS = make_tensor(tSrS.data(), select<1, 0>(rows));    // (queries, keys)
      Tensor rC = make_tensor(tScS.data(), select<1, 0>(coords));  // (queries, keys)
      mask_scores_by_side<kTileM, kTileN>(rS, rC, sequence, step.m_block * kTileM, n_begin,
                                          QueryPacking{0, 1, 1});
      if ((step.m_block + 1) * kTileM > sequence.seqlen_q) {
        mask_missing_queries(rS, rC, sequence, step.m_block * kTileM);
      }
    }
  }

  // This thread's part of one number a query, like an accumulator (MMA, MMA_N, MMA_M).
  CUTE_DEVICE auto row_numbers(float const* numbers) const {
    using namespace cute;
    typename Traits::TiledMmaS mma;
    return mma.get_slice(thread).partition_C(
        make_tensor(make_smem_ptr(numbers), typename Traits::SmemLayoutRow{}));
  }

  // dP^T + delta = V dO^T + delta; under its products P^T from S^T, column by column.
  template <class Product, class Scores>
  CUTE_DEVICE void probabilities(Product& product, int stage, Scores& tSrS, Scores& tSrP) {
    using namespace cute;
    Tensor tSsL = row_numbers(shared.lse[stage]);                           // (MMA, MMA_N, MMA_M)
    Tensor sL = make_tensor(tSsL.data(), rows_and_columns(tSsL.layout()));  // (ROWS, COLS)
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));  // (ROWS, COLS)
    constexpr int kCols = decltype(size<1>(rS))::value;
    constexpr int kBlocks = kHeadDimV / 16;
    product.add_to(tSrP, [&](int k) {
      CUTE_UNROLL
      for (int col = 0; col < kCols; ++col) {
        if (col * kBlocks / kCols != k) {
          continue;  // under the products of another K block
        }
        elements.begin(rS(_, col), sL(0, col));
      }
    });
  }

  // dV += P^T dO and dK += dS^T Q with dS = P (dP + delta), unscaled.
  // load_next() starts copies into the other stage: behind the first product, when warps are no
  // longer in step and one's address arithmetic runs under another's MMAs.
  template <class GradK, class GradV, class GradQ, class LoadNext>
  CUTE_DEVICE void grad_keys(Step const& step, int stage, GradK& tKrK, GradV& tVrV,
                             GradQ const& tQrQ, LoadNext&& load_next) {
    using namespace cute;
    typename Traits::TiledMmaS mma_s;
    typename Traits::TiledMmaKV mma;
    auto tSrS =
        partition_fragment_C(mma_s, Shape<Int<kTileN>, Int<kTileM>>{});  // (MMA, MMA_N, MMA_M)
    auto tSrP =
        partition_fragment_C(mma_s, Shape<Int<kTileN>, Int<kTileM>>{});  // (MMA, MMA_N, MMA_M)
    sums.await();
    scores(stage, tSrS, tQrQ);
    auto product = smem_product<typename Traits::TiledMmaS>(
        typename Operands::V(addresses.k, offsetof(SharedMemory, v)),
        typename Operands::GradO(addresses.q + stage * sizeof(shared.grad_o[0]),
                                 offsetof(SharedMemory, grad_o)));
    Tensor tSsD = row_numbers(shared.delta[stage]);  // (MMA, MMA_N, MMA_M)
    CUTE_UNROLL
    for (int i = 0; i < size(tSrP); ++i) {
      tSrP(i) = tSsD(i);
    }
    load_next();
    if constexpr (BackwardScores<Traits::kKey.score_mod>::kMasksFirst) {
      mask(step, tSrS);
    }
    probabilities(product, stage, tSrS, tSrP);
    if constexpr (!BackwardScores<Traits::kKey.score_mod>::kMasksFirst) {
      mask(step, tSrS);
    }

    Tensor sP =  // (N, M)
        make_tensor(make_smem_ptr(shared.p.data()), typename Traits::SmemLayoutP{});
    Tensor sS =  // (N, M)
        make_tensor(make_smem_ptr(shared.grad_s.data()), typename Traits::SmemLayoutP{});
    // What a column of warps has of an operand: kPartM of its K.
    auto const part_p = [&](uint32_t p, int index) {
      return typename Operands::P(addresses.p + Operands::part_of_p(index), p);
    };
    auto const part_qt = [&](int index) {
      return typename Operands::Qt(addresses.qt + stage * sizeof(shared.q[0]) +
                                       Operands::template part_of_t<kHeadDim>(index),
                                   offsetof(SharedMemory, q));
    };
    auto const part_ot = [&](int index) {
      return typename Operands::GradOt(addresses.qt + stage * sizeof(shared.grad_o[0]) +
                                           Operands::template part_of_t<kHeadDimV>(index),
                                       offsetof(SharedMemory, grad_o));
    };

    // The own part, from registers.
    Tensor rP = make_tensor(tSrS.data(), as_a_operand(tSrS.layout()));  // (MMA, MMA_N, MMA_M / 2)
    Tensor rS = make_tensor(tSrP.data(), as_a_operand(tSrP.layout()));  // (MMA, MMA_N, MMA_M / 2)
    Tensor tSsL = row_numbers(shared.lse[stage]);                       // (MMA, MMA_N, MMA_M)
    Tensor sL = make_tensor(tSsL.data(), as_a_operand(tSsL.layout()));  // (MMA, MMA_N, MMA_M / 2)
    auto const thread_mma_s = mma_s.get_slice(thread);
    Tensor tSsP = thread_mma_s.partition_C(sP);  // (MMA, MMA_N, MMA_M)
    Tensor tSsS = thread_mma_s.partition_C(sS);  // (MMA, MMA_N, MMA_M)
    auto rS16 = make_tensor<Element>(shape(rS));
    auto const own_p = [&](int k) {
      Tensor p = operand_rows(rP(_, _, k));    // (ROWS, COLS)
      Tensor s = operand_rows(rS(_, _, k));    // (ROWS, COLS)
      Tensor lse = operand_rows(sL(_, _, k));  // (ROWS, COLS)
      CUTE_UNROLL
      for (int col = 0; col < size<1>(p); ++col) {
        elements.finish(p(_, col), s(_, col), lse(0, col));
      }
      Tensor s16 = rS16(_, _, k);                           // (MMA, MMA_N)
      auto p16 = make_tensor<Element>(shape(rP(_, _, k)));  // (MMA, MMA_N)
      round_into(rS(_, _, k), s16);
      round_into(rP(_, _, k), p16);
      store_operand_block(s16, tSsS, k);
      if constexpr (Traits::kWarpsM > 1) {
        store_operand_block(p16, tSsP, k);
      }
      return p16;
    };
    gemm_register_a(mma, own_p, part_ot(own), tVrV);
    gemm_register_a(mma, [&](int k) { return rS16(_, _, k); }, part_qt(own), tKrK);
    if constexpr (Traits::kWarpsM == 1) {
      await_scores();
      sums.end(thread);
    } else {
      int other = Operands::column_after(own, 1);
      Tensor tVrO = load_operand_b(mma, part_ot(other));  // (MMA, MMA_D, MMA_M)
      await_scores();
      sums.end(thread);
      gemm_register_b(mma, part_p(offsetof(SharedMemory, p), other), tVrO, tVrV);
      gemm_smem(mma, part_p(offsetof(SharedMemory, grad_s), other), part_qt(other), tKrK);
      CUTE_UNROLL
      for (int i = 2; i < Traits::kWarpsM; ++i) {
        other = Operands::column_after(own, i);
        gemm_smem(mma, part_p(offsetof(SharedMemory, p), other), part_ot(other), tVrV);
        gemm_smem(mma, part_p(offsetof(SharedMemory, grad_s), other), part_qt(other), tKrK);
      }
    }
  }

  // dQ = dS K, unscaled, of this block of keys.
  template <class GradQ>
  CUTE_DEVICE void grad_queries(Step const& step, GradQ& tQrQ) {
    using namespace cute;
    sums.block = params.grad_q_sum + step.grad_q_block * (kTileM * kHeadDim);
    if (params.grad_q_turn != nullptr) {
      KvTiles const keys = kv_tiles(sequence, step.m_block * kTileM, kTileM, kTileN);
      sums.set_turn(params.grad_q_turn + step.grad_q_block, tile.n_block - keys.begin);
    }
    clear(tQrQ);
    gemm_smem(typename Traits::TiledMmaQ{},
              typename Operands::Pt(addresses.pt, offsetof(SharedMemory, grad_s)),
              typename Operands::Kt(addresses.kt, offsetof(SharedMemory, k)), tQrQ);
  }

  // dK and dV leave through shared memory in whole 16-byte vectors.
  template <class GradK, class GradV>
  CUTE_DEVICE void store(GradK& tKrK, GradV& tVrV) {
    using namespace cute;
    CUTE_UNROLL
    for (int i = 0; i < size(tKrK); ++i) {
      tKrK(i) *= params.scale;
    }
    Tensor sK =  // (N, D)
        make_tensor(make_smem_ptr(shared.k.data()), typename Traits::SmemLayoutK{});
    Tensor sV =  // (N, DV)
        make_tensor(make_smem_ptr(shared.v.data()), typename Traits::SmemLayoutV{});
    Tensor rK16 = convert<Element>(tKrK);  // (MMA, MMA_N, MMA_D)
    Tensor rV16 = convert<Element>(tVrV);  // (MMA, MMA_N, MMA_D)
    __syncthreads();                       // all are done with K and V
    typename Operands::PlaceOfGradK(shared.k.data(), thread).store(rK16);
    typename Operands::PlaceOfGradV(shared.v.data(), thread).store(rV16);
    __syncthreads();
    int64_t const row = sequence.row_k + n_begin;
    store_tile(typename Traits::GmemStoreQK{}, sK,
               head_tile<kTileN, kHeadDim>(static_cast<Element*>(params.grad_k),
                                           params.grad_k_stride, tile.batch, tile.head_kv, row),
               sequence.seqlen_k - n_begin, params.head_dim, thread);
    store_tile(typename Traits::GmemStoreV{}, sV,
               head_tile<kTileN, kHeadDimV>(static_cast<Element*>(params.grad_v),
                                            params.grad_v_stride, tile.batch, tile.head_kv, row),
               sequence.seqlen_k - n_begin, params.head_dim_v, thread);
  }
};

}  // namespace cute_attention::sm80
