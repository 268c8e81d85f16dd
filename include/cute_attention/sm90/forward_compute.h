// sm90/forward_compute.h: what a consumer warpgroup does: it computes O for its 64 queries of every
// tile.
//
// While one warpgroup computes its softmax, the tensor cores compute the products of another. S(n)
// is Q K^T with KV tile n, O(n) adds P V with KV tile n:
//
//   warpgroup 0   S(n-1) O(n) | softmax(n-1)  | S(n-2) O(n-1) | softmax(n-2)  | ...
//   warpgroup 1               | S(n-1) O(n)   | softmax(n-1)  | S(n-2) O(n-1) | ...
//
// A warpgroup starts S of the next KV tile right before O of this one, and modifies and masks S
// while the tensor cores compute O. At the end of a tile of queries it starts the first S of the
// next tile of queries instead.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/sm90/forward_scores.h"
#include "cute_attention/sm90/forward_store.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/gemm.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardCompute {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Ring = sm90::Ring<Traits::kStages>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  using Scores = ForwardScores<Row>;
  using TileO = cute::Shape<cute::Int<kWarpgroupM>, cute::Int<Traits::kHeadDimV>>;
  using FragmentO = decltype(cute::partition_fragment_C(typename Traits::MmaPV{}, TileO{}));
  using FragmentP =
      decltype(cute::make_tensor<Element>(as_a_operand(typename Scores::FragmentS{}.layout())));
  using Softmax = typename Scores::Softmax;

  ForwardArguments const& arguments;
  SharedMemory& shared;
  int const warpgroup;  // of the consumers
  int const thread;     // of the warpgroup

  FragmentO tOrO;  // (MMA, MMA_M, MMA_DV)
  FragmentP tOrP;  // (MMA, MMA_M, MMA_N / 16)
  Scores scores;
  Ring ring_k{};
  sm90::Ring<Traits::kStagesQ> ring_q{};
  sm90::Ring<kTileSlots> ring_tile{};

  CUTE_DEVICE ForwardCompute(ForwardArguments const& arguments, SharedMemory& shared, int warpgroup,
                             int thread)
      : arguments(arguments),
        shared(shared),
        warpgroup(warpgroup),
        thread(thread),
        scores(arguments, warpgroup, thread) {}

  CUTE_DEVICE void run() {
    if (warpgroup == Traits::kConsumers - 1) {
      pass_turn();  // the first turn is warpgroup 0's
    }
    while (true) {
      ForwardTile const& tile = wait_for_tile();
      if (tile.is_end()) {
        return;
      }
      if (!tile.sees_keys()) {
        store_empty<Row>(arguments, tile, m_offset(), thread);
      } else if (is_idle(tile)) {
        pass_tile(tile);
      } else {
        compute();
      }
      release_tile();
    }
  }

 private:
  // Waits until the scheduler warp has written the tile at ring_tile.
  CUTE_DEVICE ForwardTile const& wait_for_tile() {
    Barrier::wait(&shared.tile_full[ring_tile.stage], ring_tile.parity);
    return shared.tiles[ring_tile.stage];
  }

  CUTE_DEVICE void release_tile() {
    __syncwarp();  // all lanes have read it
    release(shared.tile_empty[ring_tile.stage]);
    ring_tile.advance();
  }

  // Computes this tile, and the tiles after it up to the next one that this warpgroup does not
  // compute: between those the tensor cores do not wait for it.
  CUTE_DEVICE void compute() {
    cute::clear(tOrO);
    skip_hidden_keys(shared.tiles[ring_tile.stage]);
    wait_for_query();
    wait_for_keys();
    start_scores();
    cute::warpgroup_wait<0>();
    first_probabilities();
    while (true) {
      walk_kv_tiles();
      auto next = ring_tile;
      next.advance();
      Barrier::wait(&shared.tile_full[next.stage], next.parity);
      ForwardTile const& next_tile = shared.tiles[next.stage];
      if (next_tile.is_end() || !next_tile.sees_keys() || is_idle(next_tile)) {
        break;
      }
      change_tile(next_tile);
    }
    last_output();
  }

  // Whether the sequence ends before this warpgroup's queries of the tile.
  CUTE_DEVICE bool is_idle(ForwardTile const& tile) const {
    return tile.m_begin + arguments.packing.query(m_offset()) >= tile.sequence.seqlen_q;
  }

  // For a tile that only other warpgroups compute: releases its Q, K and V unread, and takes and
  // passes as many turns as they do.
  CUTE_DEVICE void pass_tile(ForwardTile const& tile) {
    wait_for_query();
    release(shared.query_empty[ring_q.stage][warpgroup]);
    ring_q.advance();
    for (int32_t count = tile.kv.end - tile.kv.begin; count > 0; --count) {
      wait_for_keys();
      release(shared.key_empty[ring_k.stage]);
      ring_k.advance();
      skip_values(ring_v());
    }
  }

  // First row of this warpgroup in its tile.
  CUTE_DEVICE int m_offset() const { return scores.m_offset(); }

  // If only other warpgroups need the last KV tile, releases its K unread; skip_hidden_values()
  // does so with its V, a turn later.
  CUTE_DEVICE void skip_hidden_keys(ForwardTile const& tile) {
    if (tile.walks[warpgroup].end < tile.kv.end) {
      wait_for_keys();
      release(shared.key_empty[ring_k.stage]);
      ring_k.advance();
    }
  }
  CUTE_DEVICE void skip_hidden_values() { skip_values(before(ring_v())); }

  // Releases a V unread, and takes and passes a turn: all warpgroups must take as many turns.
  CUTE_DEVICE void skip_values(Ring const& ring) {
    Barrier::wait(&shared.value_full[ring.stage], ring.parity);
    release_values(ring);
    take_turn();
    pass_turn();
  }

  // Visits all KV tiles but the first, whose P there is already.
  CUTE_DEVICE void walk_kv_tiles() {
    ForwardTile const& tile = shared.tiles[ring_tile.stage];
    KvTiles const walk = tile.walks[warpgroup];
    if (walk.end < tile.kv.end) {
      skip_hidden_values();
    }
    for (int32_t n_block = walk.end - 2; n_block >= walk.begin; --n_block) {
      if (walk.masked(n_block)) {
        step<true>(n_block, n_block == walk.begin);
      } else {
        step<false>(n_block, n_block == walk.begin);
      }
    }
  }

  // Waits until it is this warpgroup's turn to start products.
  CUTE_DEVICE void take_turn() {
    if constexpr (Traits::kTakeTurns) {
      cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads,
                                        uint32_t(NamedBarrier::kTurn) + warpgroup);
    }
  }
  CUTE_DEVICE void pass_turn() {
    if constexpr (Traits::kTakeTurns) {
      int const next = warpgroup == Traits::kConsumers - 1 ? 0 : warpgroup + 1;
      cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads,
                                          uint32_t(NamedBarrier::kTurn) + next);
    }
  }

  // Tells the load warp that this warp's MMAs have read a buffer.
  CUTE_DEVICE void release(uint64_t& empty) {
    if (thread % 32 == 0) {
      Barrier::arrive(&empty);
    }
  }

  CUTE_DEVICE void wait_for_query() {
    Barrier::wait(&shared.query_full[ring_q.stage][warpgroup], ring_q.parity);
  }
  CUTE_DEVICE void wait_for_keys() { Barrier::wait(&shared.key_full[ring_k.stage], ring_k.parity); }

  // Starts S = Q K^T with the next K. Q and K must be there.
  CUTE_DEVICE void start_scores() {
    using namespace cute;
    typename Traits::MmaQK mma;
    Tensor sQ =  // (64, D, WARPGROUP)
        make_tensor(make_smem_ptr(shared.q.data()), typename Traits::SmemLayoutQ{});
    Tensor sK =  // (N, D, STAGE)
        make_tensor(make_smem_ptr(shared.k.data()), typename Traits::SmemLayoutK{});
    CUTE_STATIC_ASSERT_V(size<0>(sQ) == Int<kWarpgroupM>{});
    CUTE_STATIC_ASSERT_V(size<0>(sK) == Int<kTileN>{});
    CUTE_STATIC_ASSERT_V(size<1>(sQ) == size<1>(sK));  // D
    auto const thread_mma = mma.get_slice(0);
    Tensor tSrQ = thread_mma.partition_fragment_A(sQ);  // (MMA, MMA_M, MMA_D, WARPGROUP)
    Tensor tSrK = thread_mma.partition_fragment_B(sK);  // (MMA, MMA_N, MMA_D, STAGE)
    start_gemm<GMMA::ScaleOut::Zero>(mma,
                                     tSrQ(_, _, _, ring_q.stage * Traits::kConsumers + warpgroup),
                                     tSrK(_, _, _, ring_k.stage), scores.accumulator);
  }

  CUTE_DEVICE static Ring before(Ring const& ring) {
    bool const wraps = ring.stage == 0;
    return {wraps ? Traits::kStages - 1 : ring.stage - 1, ring.parity ^ uint32_t(wraps)};
  }

  // The stage of V to read next: V is read one KV tile after K.
  CUTE_DEVICE Ring ring_v() const { return before(ring_k); }

  // Waits for the V of the KV tile whose P was computed last. Its K must have been released.
  CUTE_DEVICE void wait_for_values() {
    Ring const v = ring_v();
    Barrier::wait(&shared.value_full[v.stage], v.parity);
  }

  // Starts O += P V. V must be there.
  CUTE_DEVICE void start_output(Ring const& ring_v) {
    using namespace cute;
    typename Traits::MmaPV mma;
    Tensor sVt =  // (DV, N, STAGE)
        make_tensor(make_smem_ptr(shared.v.data()), typename Traits::SmemLayoutVt{});
    CUTE_STATIC_ASSERT_V(size<0>(sVt) == Int<Traits::kHeadDimV>{});
    CUTE_STATIC_ASSERT_V(size<1>(sVt) == Int<kTileN>{});
    Tensor tOrV = mma.get_slice(0).partition_fragment_B(sVt);  // (MMA, MMA_DV, MMA_N, STAGE)
    start_gemm<GMMA::ScaleOut::One>(mma, tOrP, tOrV(_, _, _, ring_v.stage), tOrO);
  }

  // Where the bias lies beside K, adds it to S, which is there.
  CUTE_DEVICE void add_bias(ForwardTile const& tile) {
    if constexpr (Traits::kBiasTiles) {
      cute::warpgroup_fence_operand(scores.accumulator);
      scores.add_bias(tile, shared.bias_tile(ring_k.stage));
      __syncwarp();  // all lanes have read it, before it is released with K
    }
  }

  // Once S is there, this warp's MMAs have read its K, and with the tile's last S also Q: releases
  // them.
  CUTE_DEVICE void release_scores(bool last) {
    cute::warpgroup_fence_operand(scores.accumulator);
    release(shared.key_empty[ring_k.stage]);
    ring_k.advance();
    if (last) {
      release(shared.query_empty[ring_q.stage][warpgroup]);
      ring_q.advance();
    }
  }

  CUTE_DEVICE void release_output(Ring const& ring_v) {
    cute::warpgroup_fence_operand(tOrO);
    release_values(ring_v);
  }

  // Waits for the O that the V of `ring_v` is part of, and releases this V.
  CUTE_DEVICE void end_output(Ring const& ring_v) {
    if constexpr (!Scores::kStraight) {
      // The compiler would move the wait for O above the exponentials. It leaves them before this
      // one, for the next V.
      cute::warpgroup_fence_operand(scores.accumulator);
      wait_for_values();
    }
    cute::warpgroup_wait<0>();
    release_output(ring_v);
  }

  CUTE_DEVICE void release_values(Ring const& ring_v) { release(shared.value_empty[ring_v.stage]); }

  // O of this thread, (ROWS, COLS).
  CUTE_DEVICE auto output() {
    using namespace cute;
    Tensor rO = make_tensor(tOrO.data(), rows_and_columns(tOrO.layout()));  // (ROWS, COLS)
    CUTE_STATIC_ASSERT_V(size<0>(rO) == size(typename Softmax::Rows{}));
    return rO;
  }

  // Computes P of a tile's first KV tile. S must be there.
  CUTE_DEVICE void first_probabilities() {
    ForwardTile const& tile = shared.tiles[ring_tile.stage];
    KvTiles const walk = tile.walks[warpgroup];
    int32_t const n_block = walk.end - 1;
    add_bias(tile);
    release_scores(n_block == walk.begin);
    scores.first(tile, n_block, !walk.masked(n_block));
    scores.template exponentiate<true>(  // there is no output yet
        tOrP, [] {}, [](auto const&) {});
    scores.drop(tile, n_block, tOrP);
  }

  // Visits one KV tile: starts S(n_block) and O(n_block + 1), for which P is there, and turns S
  // into the next P. kMasked: not every query sees every key of the KV tile.
  template <bool kMasked>
  CUTE_DEVICE void step(int32_t n_block, bool last) {
    Ring const v = ring_v();
    wait_for_keys();
    take_turn();
    start_scores();
    wait_for_values();
    start_output(v);
    pass_turn();
    cute::warpgroup_wait<1>();
    ForwardTile const& tile = shared.tiles[ring_tile.stage];
    add_bias(tile);
    release_scores(last);
    scores.template next<kMasked>(tile, n_block);
    scores.template exponentiate<kMasked>(
        tOrP, [&] { end_output(v); },
        [&](auto const& factors) {
          auto rO = output();
          scale_rows(rO, factors);
        });
    scores.drop(tile, n_block, tOrP);
  }

  // Starts the last O of one tile and the first S of the next, and stores O while the tensor cores
  // compute S.
  CUTE_DEVICE void change_tile(ForwardTile const& next) {
    Ring const v = ring_v();
    wait_for_values();
    skip_hidden_keys(next);
    take_turn();
    start_output(v);
    wait_for_query();
    wait_for_keys();
    start_scores();
    pass_turn();
    Ending const ending = end_softmax();
    cute::warpgroup_wait<1>();
    release_output(v);
    store(ending);
    release_tile();
    cute::clear(tOrO);
    cute::warpgroup_wait<0>();
    first_probabilities();
  }

  CUTE_DEVICE void last_output() {
    Ring const v = ring_v();
    wait_for_values();
    take_turn();
    start_output(v);
    pass_turn();
    Ending const ending = end_softmax();
    cute::warpgroup_wait<0>();
    release_output(v);
    store(ending);
  }

  // What the softmax of a tile of queries ends with.
  struct Ending {
    typename Softmax::Rows factors;  // (ROWS) normalise O; of a split, the sums of its rows
    typename Softmax::Rows lse;      // (ROWS) of a split, the bases of its rows
  };

  // Ends the softmax of the tile's rows, and joins their sinks. It needs no O: called while the
  // tensor cores compute the last one, it takes no time of its own.
  CUTE_DEVICE Ending end_softmax() {
    if (has_splits(arguments.params)) {
      return {scores.softmax.sums(), scores.softmax.bases()};
    }
    ForwardTile const& tile = shared.tiles[ring_tile.stage];
    Ending ending;
    ending.factors = scores.softmax.finish(ending.lse);
    join_sinks(arguments.params, heads_of_thread(arguments, tile, m_offset(), thread),
               ending.factors, ending.lse);
    if constexpr (Scores::kDrops) {
      CUTE_UNROLL
      for (int row = 0; row < cute::size(ending.factors); ++row) {
        ending.factors(row) *= keep_scale(arguments.params.dropout);
      }
    }
    return ending;
  }

  CUTE_DEVICE void store(Ending const& ending) {
    auto rO = output();
    ForwardTile const& tile = shared.tiles[ring_tile.stage];
    if (has_splits(arguments.params)) {
      store_split<Row>(arguments, tile, m_offset(), thread, rO, ending.factors, ending.lse);
      return;
    }
    scale_rows(rO, ending.factors);
    store_tile<Element>(arguments, tile, m_offset(), thread, rO, ending.lse);
  }
};

}  // namespace cute_attention::sm90
