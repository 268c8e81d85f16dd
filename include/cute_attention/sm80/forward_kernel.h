// sm80/forward_kernel.h: the sm80 forward kernel: one CTA computes one tile of queries. They are
// of one head, or with few queries of several that read the same keys (forward_rows.h).
//
// K and V have one buffer each, in all rows of the tables. Every copy runs while a product or the
// softmax runs (copy_schedule.h):
//
//   cp.async   Q K(n)  | V(n)                | K(n-1)   | V(n-1) ...
//   MMA                | S = Q K^T | softmax | O += P V | S = Q K^T ...
//
// A bias has one buffer, too, and is copied with K (forward_bias.h).
//
// On an NVIDIA H200 an MMA occupies its quarter of a multiprocessor for 6 clocks, and every other
// instruction for about one clock, also where it stands between MMAs. So the kernel is written to
// issue few instructions.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/key_splits.h"
#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/online_softmax.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_mod.h"
#include "cute_attention/core/sink.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm80/copy.h"
#include "cute_attention/sm80/copy_schedule.h"
#include "cute_attention/sm80/forward_bias.h"
#include "cute_attention/sm80/forward_dropout.h"
#include "cute_attention/sm80/forward_operand.h"
#include "cute_attention/sm80/forward_rows.h"
#include "cute_attention/sm80/forward_split.h"
#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/gemm.h"
#include "cute_attention/sm80/page_load.h"
#include "cute_attention/sm80/tile_walk.h"

namespace cute_attention::sm80 {

template <class Row, KeyPlace kPlace>
struct ForwardKernel {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Modifiers = ScoreModifiers<kScoreMods>;
  using OtherModifiers = ScoreModifiers<kScoreMods, score_mods::Bias>;  // than the bias
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  using Operands = ForwardOperands<Traits>;
  using Study = typename Traits::Study;
  using Schedule = CopySchedule<Study::kLoads, Traits::kStages>;
  using WalkK = TileWalk<typename Traits::GmemCopyQK, typename Traits::SmemLayoutK, Traits::kStages,
                         Study::kCopies>;
  using WalkV = TileWalk<typename Traits::GmemCopyV, typename Traits::SmemLayoutV, Traits::kStages,
                         Study::kCopies>;
  static constexpr bool kSharesKeys = Traits::kSharesKeys;
  using Dropout = ForwardDropout<Traits>;
  using Rows = ForwardRows<Traits, kPacksHeads<Row>>;
  using Params = typename Rows::Params;

  Params const& params;
  SharedMemory& shared;
  WorkTile const work;
  int const head_kv;
  Sequence const sequence;
  int const m_begin;  // first query of the tile
  int const thread;

  CUTE_DEVICE ForwardKernel(Params const& params, SharedMemory& shared, WorkTile const& work)
      : params(params),
        shared(shared),
        work(work),
        head_kv(work.head / (params.heads / params.heads_kv)),
        sequence(load_sequence_of<reads_cache(kScoreMods)>(params, work.batch)),
        m_begin(work.m_block * packing().queries(kTileM)),
        thread(int(threadIdx.x)) {}

  // Not a member: what holds addresses of members stays in memory.
  CUTE_DEVICE Rows rows() const { return {params, work, sequence, m_begin}; }

  CUTE_DEVICE auto packing() const -> decltype(Rows::packing(params)) {
    return Rows::packing(params);
  }

  // A buffer of shared memory as a tensor with the shape of Layout.
  template <class Layout, class Buffer>
  CUTE_DEVICE static auto smem_tensor(Buffer& buffer) {
    return cute::make_tensor(cute::make_smem_ptr(buffer.data()), Layout{});
  }

  CUTE_DEVICE void run() {
    using namespace cute;
    if (m_begin >= sequence.seqlen_q) {
      return;  // the sequence is shorter than the longest, which the grid was made for
    }
    typename Traits::TiledMma mma;
    auto tOrO =
        partition_fragment_C(mma, Shape<Int<kTileM>, Int<kHeadDimV>>{});  // (MMA, MMA_M, MMA_DV)
    clear(tOrO);
    OnlineSoftmax<2 * decltype(size<1>(tOrO))::value, Traits::kMostLag> softmax(
        Modifiers::exponent_scale(params));
    KvTiles tiles = kv_tiles(sequence, m_begin, packing().queries(kTileM), kTileN);
    if (has_splits(params)) {
      tiles = split_tiles(tiles, split(), params.num_splits);
    }
    if (tiles.begin < tiles.end) {
      compute(mma, tiles, tOrO, softmax);
    }
    if (has_splits(params)) {
      store_split(mma, tOrO, softmax);
    } else {
      store(mma, tOrO, softmax);
    }
  }

  // The split of the keys that this CTA has.
  CUTE_DEVICE static int32_t split() { return int32_t(blockIdx.y); }

  // Walks the KV tiles from right to left: O += softmax(Q K^T) V.
  //   tOrO  (MMA, MMA_M, MMA_DV)
  template <class TiledMma, class Output, class Softmax>
  CUTE_DEVICE void compute(TiledMma const& mma, KvTiles const& tiles, Output& tOrO,
                           Softmax& softmax) {
    using namespace cute;
    auto const q = typename Operands::Q(shared.q.data(), thread).held();
    auto k = typename Operands::K(shared.k.data(), thread).held();
    auto v = typename Operands::V(shared.v.data(), thread).held();
    auto const p = in_shared_p<typename Operands::P>();
    auto const place_of_p = in_shared_p<typename Operands::PlaceOfP>();
    WalkK walk_k(key_tile(params.k, params.k_stride, tiles.end - 1), params.k_stride.row,
                 shared.k.data(), thread);
    WalkV walk_v(key_tile(params.v, params.v_stride, tiles.end - 1), params.v_stride.row,
                 shared.v.data(), thread);
    // Rows of the tile where the walk begins, the only one that may reach past the sequence's end.
    int const last_rows = sequence.seqlen_k - (tiles.end - 1) * kTileN;
    Modifiers const modifiers(params);
    typename Modifiers::Terms::template OfRows<decltype(size(typename Softmax::Rows{}))::value>
        terms;
    if constexpr (Modifiers::kHasTerm) {
      terms.load(
          params, work.batch, [&](int) { return work.head; }, Modifiers::exponent_scale(params));
    }
    Dropout const dropout(params, work, m_begin, thread);

    // Each starts the copy of the next tile.
    int next_k = tiles.end - 1, next_v = next_k;
    auto const keys = [&](auto is_last) {
      load_bias(next_k);
      load_k<is_last>(walk_k, next_k--, last_rows);
    };
    auto const values = [&](auto is_last) { load_v<is_last>(walk_v, next_v--, last_rows); };
    rows().load_q(shared.q, thread);
    Schedule::begin(keys, values);
    for (int n_block = tiles.end - 1; n_block >= tiles.begin; --n_block) {
      bool const last = n_block == tiles.end - 1;
      bool const more = n_block > tiles.begin;
      bool const masked = last || tiles.masked(n_block);
      Schedule::at_scores(last, more, keys, values);  // with the first K(n), Q is there too
      auto tSrS =
          partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});  // (MMA, MMA_M, MMA_N)
      clear(tSrS);
      gemm_smem<Study::kFragmentsAhead>(mma, q, k, tSrS);
      take_probabilities(mma, modifiers, terms, n_block, masked, tSrS, tOrO, softmax);
      auto& tPrP = tSrS;  // (MMA, MMA_M, MMA_N): the scores have become probabilities in place
      if constexpr (Traits::kPInSharedMemory) {
        place_of_p.store(kept_probabilities(mma, dropout, n_block, tPrP));
      }
      Schedule::at_output(last, more, keys, values);  // P of all warps is there too
      multiply_values(mma, p, v, dropout, n_block, tPrP, tOrO);
      if constexpr (Traits::kStages == 2) {  // the next tile lies in the other buffers
        k.base ^= Traits::kBytesK;
        v.base ^= Traits::kBytesV;
      }
    }
  }

  // Start the copies of the next tile of K or of V, number `n_block`. kLast: it is the tile where
  // the walk begins, with `last_rows` rows inside the sequence.
  template <bool kLast>
  CUTE_DEVICE void load_k(WalkK& walk, int n_block, int last_rows) const {
    if constexpr (kPlace == KeyPlace::Pages) {
      load_pages(walk, params.k, params.k_stride, n_block, params.head_dim);
    } else {
      walk.template load<kLast>(params.k_stride.row, last_rows, params.head_dim, thread);
    }
  }
  template <bool kLast>
  CUTE_DEVICE void load_v(WalkV& walk, int n_block, int last_rows) const {
    if constexpr (kPlace == KeyPlace::Pages) {
      load_pages(walk, params.v, params.v_stride, n_block, params.head_dim_v);
    } else {
      walk.template load<kLast>(params.v_stride.row, last_rows, params.head_dim_v, thread);
    }
  }

  CUTE_DEVICE void load_bias(int n_block) {
    if constexpr (Traits::kHasBias) {
      ForwardBias<Traits>::load(params, work, sequence, m_begin, n_block * kTileN, shared.bias,
                                thread);
    }
  }

  // Adds the terms of the modifiers to the scores of a tile.
  //   score_tile()  describes the scores (score_tile.h)
  //   tSrS          (MMA, MMA_M, MMA_N)
  template <class ScoreTileOf, class Terms, class Scores>
  CUTE_DEVICE void add_terms(ScoreTileOf const& score_tile, Terms const& terms, Scores& tSrS) {
    if constexpr (Traits::kHasBias) {
      if (has_bias_tiles<kScoreMods>(params, sequence)) {
        ForwardBias<Traits>::add(Modifiers::exponent_scale(params), shared.bias, thread, tSrS);
        if constexpr (OtherModifiers::kHasTerm) {
          OtherModifiers::Terms::template add<Element>(params, score_tile(), terms.first);
        }
        return;
      }
    }
    Modifiers::Terms::template add<Element>(params, score_tile(), terms);
  }

  // The first row of a tile of keys of K or V, where they are not in pages.
  CUTE_DEVICE Element const* key_tile(void const* tensor, Strides const& stride, int n_block) {
    auto const* const head = row_pointer(static_cast<Element const*>(tensor), stride,
                                         cache_row(params, work.batch), head_kv, 0);
    return head + (sequence.row_k + n_block * kTileN) * stride.row;
  }

  template <class Walk>
  CUTE_DEVICE void load_pages(Walk& walk, void const* tensor, Strides const& stride, int n_block,
                              int cols) const {
    PagedKeys{params, sequence, work.batch, head_kv, m_begin}.template load<kTileN>(
        walk, static_cast<Element const*>(tensor), stride, n_block, cols, thread);
  }

  // An operand or a place in the P of shared memory, if P goes through it.
  template <class Place>
  CUTE_DEVICE auto in_shared_p() {
    if constexpr (Traits::kPInSharedMemory) {
      return Place(shared.p.data(), thread).held();
    } else {
      return typename Traits::Nothing{};
    }
  }

  // Modifies and masks the scores of a tile, turns them into probabilities, and rescales O where
  // the softmax has changed a row's reference.
  //   tSrS     (MMA, MMA_M, MMA_N)    tOrO  (MMA, MMA_M, MMA_DV)
  //   terms    what the modifiers know of the rows
  template <class TiledMma, class Terms, class Scores, class Output, class Softmax>
  CUTE_DEVICE void take_probabilities(TiledMma const& mma, Modifiers const& modifiers,
                                      Terms const& terms, int n_block, bool masked, Scores& tSrS,
                                      Output& tOrO, Softmax& softmax) {
    typename Softmax::Rows factors;  // (ROWS)
    using namespace cute;
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));  // (ROWS, COLS)
    Tensor rO = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));  // (ROWS, COLS)
    CUTE_STATIC_ASSERT_V(size<0>(rS) == size<0>(rO));
    CUTE_STATIC_ASSERT_V(size<0>(rS) == size(factors));
    QueryPacking const& packing = this->packing();
    auto const score_tile = [&] {
      return make_score_tile<kTileM, kTileN>(mma, opaque(thread), tSrS, sequence, packing, m_begin,
                                             n_block * kTileN);
    };
    modify_and_mask<(kHeadDimV > 128 ? 1 : 4)>(
        modifiers, rS, masked, [&] { mask_scores(score_tile()); },
        [&] { add_terms(score_tile, terms, tSrS); });
    if (softmax.template take<true>(rS, factors, combine_rows(mma))) {
      scale_rows(rO, factors);
    }
  }

  // Combines one number for each row (ROWS) with those of the warps that have the same queries.
  template <class TiledMma>
  CUTE_DEVICE auto combine_rows(TiledMma const& mma) {
    return [&](auto& rows, auto const& op) {
      using namespace cute;
      if constexpr (kSharesKeys) {
        Tensor tScS = mma.get_slice(opaque(thread))  // (MMA, MMA_M, MMA_N)
                          .partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
        Tensor cS = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));  // (ROWS, COLS)
        CUTE_STATIC_ASSERT_V(size(rows) == size<0>(cS));
        shared.rows.combine(rows, [&](int row) { return int(get<0>(cS(row, 0))); }, thread, op);
      }
    };
  }

  // P in 16 bits, (MMA, MMA_M, MMA_N), with zeros where it is dropped.
  //   tPrP  (MMA, MMA_M, MMA_N)
  template <class TiledMma, class Probabilities>
  CUTE_DEVICE auto kept_probabilities(TiledMma const& mma, Dropout const& dropout, int n_block,
                                      Probabilities& tPrP) const {
    auto rP = convert<Element>(tPrP);  // (MMA, MMA_M, MMA_N)
    QueryPacking const& packing = this->packing();
    dropout.drop(params, rP, [&] {
      return make_score_tile<kTileM, kTileN>(mma, opaque(thread), tPrP, sequence, packing, m_begin,
                                             n_block * kTileN);
    });
    return rP;
  }

  // O += P V.
  //   p     (M, N)  the operand, where P is in shared memory
  //   v     (DV, N)
  //   tPrP  (MMA, MMA_M, MMA_N)    tOrO  (MMA, MMA_M, MMA_DV)
  template <class TiledMma, class OperandP, class OperandV, class Probabilities, class Output>
  CUTE_DEVICE void multiply_values(TiledMma const& mma, OperandP const& p, OperandV const& v,
                                   Dropout const& dropout, int n_block, Probabilities& tPrP,
                                   Output& tOrO) const {
    using namespace cute;
    if constexpr (Traits::kPInSharedMemory) {
      gemm_smem<Study::kFragmentsAhead>(mma, p, v, tOrO);
    } else {
      Tensor rP = kept_probabilities(mma, dropout, n_block, tPrP);      // (MMA, MMA_M, MMA_N)
      Tensor tOrP = make_tensor(rP.data(), as_a_operand(rP.layout()));  // (MMA, MMA_M, MMA_N / 2)
      CUTE_STATIC_ASSERT_V(size<1>(tOrP) == size<1>(tOrO));
      CUTE_STATIC_ASSERT_V(size<2>(tOrP) * _2{} == size<2>(rP));
      gemm_register_a<Study::kFragmentsAhead>(
          mma, [&](int k_block) { return tOrP(_, _, k_block); }, v, tOrO);
    }
  }

  // Normalises O and writes it through shared memory in whole 16-byte vectors; writes the LSE.
  //   tOrO  (MMA, MMA_M, MMA_DV)
  template <class TiledMma, class Output, class Softmax>
  CUTE_DEVICE void store(TiledMma const& mma, Output& tOrO, Softmax& softmax) {
    using namespace cute;
    Tensor rO = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));  // (ROWS, COLS)
    typename Softmax::Rows lse;                                             // (ROWS)
    CUTE_STATIC_ASSERT_V(size<0>(rO) == size(lse));
    auto factors = softmax.finish(lse, combine_rows(mma));  // (ROWS)
    Tensor cO = output_coordinates(mma);                    // (ROWS, COLS)
    join_sinks(params, [&](int row) { return rows().head(int(get<0>(cO(row, 0)))); }, factors, lse);
    Dropout::scale(params, factors);
    scale_rows(rO, factors);

    Tensor rO16 = convert<Element>(tOrO);                           // (MMA, MMA_M, MMA_DV)
    auto sO = smem_tensor<typename Traits::SmemLayoutO>(shared.o);  // (M, DV)
    CUTE_STATIC_ASSERT_V(size(rO16) * Int<Traits::kThreads>{} == size(sO));
    __syncthreads();  // all threads are done with Q, whose place O takes
    typename Operands::PlaceOfO(shared.o.data(), thread).store(rO16);
    store_lse(mma, lse);
    __syncthreads();  // all threads have written their parts of O

    rows().store_o(sO, thread);
  }

  // The (row, column) in the tile of each element of a thread's O, (ROWS, COLS).
  template <class TiledMma>
  CUTE_DEVICE auto output_coordinates(TiledMma const& mma) const {
    using namespace cute;
    Tensor tOcO = mma.get_slice(thread).partition_C(  // (MMA, MMA_M, MMA_DV)
        make_identity_tensor(Shape<Int<kTileM>, Int<kHeadDimV>>{}));
    return make_tensor(tOcO.data(), rows_and_columns(tOcO.layout()));
  }

  //   rLse  (ROWS)
  template <class TiledMma, class Rows>
  CUTE_DEVICE void store_lse(TiledMma const& mma, Rows const& rLse) {
    using namespace cute;
    if (params.lse == nullptr) {
      return;
    }
    Tensor cO = output_coordinates(mma);  // (ROWS, COLS)
    CUTE_STATIC_ASSERT_V(size<0>(cO) == size(rLse));
    auto const places = rows().places();
    if (int(get<1>(cO(0, 0))) == 0) {  // one of the threads that hold a row writes its LSE
      CUTE_UNROLL
      for (int row = 0; row < size<0>(cO); ++row) {
        int const place = int(get<0>(cO(row, 0)));
        if (places.inside(place)) {
          params.lse[places.at(place)] = rLse(row);
        }
      }
    }
  }

  // Stores what a split has of its rows.
  //   tOrO  (MMA, MMA_M, MMA_DV)
  template <class TiledMma, class Output, class Softmax>
  CUTE_DEVICE void store_split(TiledMma const& mma, Output const& tOrO, Softmax const& softmax) {
    using namespace cute;
    Tensor rO = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));  // (ROWS, COLS)
    store_split_rows(params, split(), rows().places(), rO, output_coordinates(mma),
                     softmax.sums(combine_rows(mma)), softmax.bases());
  }
};

}  // namespace cute_attention::sm80
