// sm80/forward_kernel.h: the sm80 forward kernel: one CTA computes one tile of queries of one head.
//
// One buffer each for K and V, and every copy hides behind a product:
//
//   cp.async   Q K(n)  | V(n)                | K(n-1)   | V(n-1) ...
//   MMA                | S = Q K^T | softmax | O += P V | S = Q K^T ...
//
// On an NVIDIA H200 an MMA takes 6 clocks of its part of a multiprocessor, and each other
// instruction about one, whether or not it stands between MMAs: what counts is their number.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/online_softmax.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_mod.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm80/copy.h"
#include "cute_attention/sm80/forward_operand.h"
#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/gemm.h"
#include "cute_attention/sm80/tile_walk.h"

namespace cute_attention::sm80 {

template <class Row>
struct ForwardKernel {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Modifier = ScoreModifier<Row::kKey.score_mod>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  using Operands = ForwardOperands<Traits>;
  using WalkK = TileWalk<typename Traits::GmemCopyQK, typename Traits::SmemLayoutK>;
  using WalkV = TileWalk<typename Traits::GmemCopyV, typename Traits::SmemLayoutV>;
  // Whether several warps share the keys of a tile and the columns of O.
  static constexpr bool kSharesKeys = Traits::kWarpsN > 1;

  ForwardParams const& params;
  SharedMemory& shared;
  WorkTile const work;
  int const head_kv;
  Sequence const sequence;
  int const m_begin;  // first query of the tile
  int const thread;

  CUTE_DEVICE ForwardKernel(ForwardParams const& params, SharedMemory& shared, WorkTile const& work)
      : params(params),
        shared(shared),
        work(work),
        head_kv(work.head / (params.heads / params.heads_kv)),
        sequence(load_sequence(params, work.batch)),
        m_begin(work.m_block * kTileM),
        thread(int(threadIdx.x)) {}

  template <class Layout, class Buffer>
  CUTE_DEVICE static auto smem_tensor(Buffer& buffer) {
    return cute::make_tensor(cute::make_smem_ptr(buffer.data()), Layout{});
  }

  CUTE_DEVICE void run() {
    using namespace cute;
    if (m_begin >= sequence.seqlen_q) {
      return;  // a shorter sequence than the grid was made for
    }
    typename Traits::TiledMma mma;
    auto tOrO =
        partition_fragment_C(mma, Shape<Int<kTileM>, Int<kHeadDimV>>{});  // (MMA, MMA_M, MMA_D)
    clear(tOrO);
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value, kSharesKeys ? 0 : 14> softmax(
        Modifier::exponent_scale(params));
    KvTiles const tiles = kv_tiles(sequence, m_begin, kTileM, kTileN);
    if (tiles.begin < tiles.end) {
      compute(mma, tiles, tOrO, softmax);
    }
    store(mma, tOrO, softmax);
  }

  // Walks the KV tiles, right to left: O += softmax(Q K^T) V.
  template <class TiledMma, class Output, class Softmax>
  CUTE_DEVICE void compute(TiledMma const& mma, KvTiles const& tiles, Output& tOrO,
                           Softmax& softmax) {
    using namespace cute;
    auto const q = typename Operands::Q(shared.q.data(), thread).held();
    auto const k = typename Operands::K(shared.k.data(), thread).held();
    auto const v = typename Operands::V(shared.v.data(), thread).held();
    auto const p = in_shared_p<typename Operands::P>();
    auto const place_of_p = in_shared_p<typename Operands::PlaceOfP>();
    WalkK walk_k(key_tile(params.k, params.k_stride, tiles.end - 1), params.k_stride.row,
                 shared.k.data(), thread);
    WalkV walk_v(key_tile(params.v, params.v_stride, tiles.end - 1), params.v_stride.row,
                 shared.v.data(), thread);
    // kLast: the tile where the walk begins, which alone may reach past the end of the sequence.
    int const last_rows = sequence.seqlen_k - (tiles.end - 1) * kTileN;
    auto const load_k = [&](auto last) {
      walk_k.template load<decltype(last)::value>(params.k_stride.row, last_rows, params.head_dim,
                                                  thread);
    };
    auto const load_v = [&](auto last) {
      walk_v.template load<decltype(last)::value>(params.v_stride.row, last_rows, params.head_dim_v,
                                                  thread);
    };
    Tensor rO = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));  // (ROWS, COLS)
    Modifier const modifier(params);
    typename Softmax::Rows factors;

    load_q();
    load_k(true_type{});
    for (int n_block = tiles.end - 1; n_block >= tiles.begin; --n_block) {
      bool const first = n_block == tiles.end - 1;
      bool const masked = first || tiles.masked(n_block);
      cp_async_wait<0>();  // K(n), and at the first tile Q, have landed for this thread
      __syncthreads();     // ... for all; and all are done with V(n+1)
      if (first) {
        load_v(true_type{});
      } else {
        load_v(false_type{});
      }

      auto tSrS =
          partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});       // (MMA, MMA_M, MMA_N)
      Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));  // (ROWS, COLS)
      clear(tSrS);
      gemm_smem(mma, q, k, tSrS);
      modify_and_mask<(kHeadDimV > 128 ? 1 : 4)>(modifier, rS, masked,
                                                 [&] { mask(mma, tSrS, n_block * kTileN); });
      if (softmax.template take<true, 1>(rS, factors, combine_rows(mma))) {
        scale_rows(rO, factors);
      }
      if constexpr (kSharesKeys) {
        place_of_p.store(convert<Element>(tSrS));
      }
      cp_async_wait<0>();  // V(n) has landed for this thread
      __syncthreads();     // ... for all, and P of all is there; all are done with K(n)
      if (n_block > tiles.begin) {
        load_k(false_type{});
      }
      if constexpr (kSharesKeys) {
        gemm_smem(mma, p, v, tOrO);
      } else {
        Tensor rP = convert<Element>(tSrS);                               // (MMA, MMA_M, MMA_N)
        Tensor tOrP = make_tensor(rP.data(), as_a_operand(rP.layout()));  // (MMA, MMA_M, MMA_N / 2)
        gemm_register_a(mma, [&](int k_block) { return tOrP(_, _, k_block); }, v, tOrO);
      }
    }
  }

  // Where this thread writes or reads P, if it goes through shared memory.
  template <class Place>
  CUTE_DEVICE auto in_shared_p() {
    if constexpr (kSharesKeys) {
      return Place(shared.p.data(), thread).held();
    } else {
      return typename Traits::Nothing{};
    }
  }

  // Takes numbers (ROWS) of the warps that have the same queries together.
  template <class TiledMma>
  CUTE_DEVICE auto combine_rows(TiledMma const& mma) {
    return [&](auto& rows, auto const& op) {
      using namespace cute;
      if constexpr (kSharesKeys) {
        Tensor tScS = mma.get_slice(opaque(thread))  // (MMA, MMA_M, MMA_N)
                          .partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
        Tensor cS = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));  // (ROWS, COLS)
        shared.rows.combine(rows, [&](int row) { return int(get<0>(cS(row, 0))); }, thread, op);
      }
    };
  }

  CUTE_DEVICE void load_q() {
    auto gQ = head_tile<kTileM, kHeadDim>(static_cast<Element const*>(params.q), params.q_stride,
                                          work.batch, work.head, sequence.row_q + m_begin);
    load_tile<true>(typename Traits::GmemCopyQK{}, gQ,
                    smem_tensor<typename Traits::SmemLayoutQ>(shared.q),
                    sequence.seqlen_q - m_begin, params.head_dim, thread);
    cute::cp_async_fence();
  }

  // The first row of a tile of keys of K or V.
  CUTE_DEVICE Element const* key_tile(void const* tensor, Strides const& stride, int n_block) {
    return static_cast<Element const*>(tensor) + work.batch * stride.batch + head_kv * stride.head +
           (sequence.row_k + n_block * kTileN) * stride.row;
  }

  // Hides the scores (MMA, MMA_M, MMA_N) of the tile whose first key is n_begin.
  template <class TiledMma, class Accumulator>
  CUTE_DEVICE void mask(TiledMma const& mma, Accumulator& tSrS, int n_begin) {
    QueryPacking const packing = unpacked_queries();
    mask_scores(make_score_tile<kTileM, kTileN>(mma, opaque(thread), tSrS, sequence, packing,
                                                m_begin, n_begin));
  }

  // Normalises O and writes it through shared memory in whole 16-byte vectors; writes the LSE.
  template <class TiledMma, class Output, class Softmax>
  CUTE_DEVICE void store(TiledMma const& mma, Output& tOrO, Softmax& softmax) {
    using namespace cute;
    Tensor rO = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));  // (ROWS, COLS)
    typename Softmax::Rows lse;
    scale_rows(rO, softmax.finish(lse, combine_rows(mma)));

    Tensor rO16 = convert<Element>(tOrO);  // (MMA, MMA_M, MMA_DV)
    __syncthreads();                       // all are done with Q, whose place O takes
    typename Operands::PlaceOfO(shared.o.data(), thread).store(rO16);
    store_lse(mma, lse);
    __syncthreads();

    Tensor gO =  // (M, DV)
        head_tile<kTileM, kHeadDimV>(static_cast<Element*>(params.o), params.o_stride, work.batch,
                                     work.head, sequence.row_q + m_begin);
    store_tile(typename Traits::GmemCopyO{}, smem_tensor<typename Traits::SmemLayoutO>(shared.o),
               gO, sequence.seqlen_q - m_begin, params.head_dim_v, thread);
  }

  //   rLse  (ROWS)
  template <class TiledMma, class Rows>
  CUTE_DEVICE void store_lse(TiledMma const& mma, Rows const& rLse) {
    using namespace cute;
    if (params.lse == nullptr) {
      return;
    }
    Tensor tOcO = mma.get_slice(thread).partition_C(  // (MMA, MMA_M, MMA_DV)
        make_identity_tensor(Shape<Int<kTileM>, Int<kHeadDimV>>{}));
    Tensor cO = make_tensor(tOcO.data(), rows_and_columns(tOcO.layout()));  // (ROWS, COLS)
    float* const lse = params.lse + lse_offset(params, work, sequence) + m_begin;
    if (int(get<1>(cO(0, 0))) == 0) {  // one of the threads of each row
      CUTE_UNROLL
      for (int row = 0; row < size<0>(cO); ++row) {
        int const query = int(get<0>(cO(row, 0)));
        if (m_begin + query < sequence.seqlen_q) {
          lse[query] = rLse(row);
        }
      }
    }
  }
};

}  // namespace cute_attention::sm80
