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
// next tile of queries instead. Where CTAs share an SM, others fill the tensor cores: there a
// warpgroup ends O before it starts S, so that P needs no registers beside S.
#pragma once

#include "cute_attention/sm90/forward_scores.h"
#include "cute_attention/sm90/forward_sync.h"
#include "cute_attention/sm90/gemm.h"
#include "cute_attention/sm90/output_boxes.h"
#include "cute_attention/sm90/tile_end.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardCompute {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Ring = sm90::Ring<Traits::kStages>;
  static constexpr int kTileN = Traits::kTileN;

  using Scores = ForwardScores<Row>;
  using TileO = cute::Shape<cute::Int<kWarpgroupM>, cute::Int<Traits::kHeadDimV>>;
  using FragmentO = decltype(cute::partition_fragment_C(typename Traits::MmaPV{}, TileO{}));
  using FragmentP =
      decltype(cute::make_tensor<Element>(as_a_operand(typename Scores::FragmentS{}.layout())));

  ForwardArguments const& arguments;
  SharedMemory& shared;
  int const warpgroup;  // of the consumers
  int const thread;     // of the warpgroup

  FragmentO tOrO;  // (MMA, MMA_M, MMA_DV)
  FragmentP tOrP;  // (MMA, MMA_M, MMA_N / 16)
  Scores scores;
  ForwardSync<Row> sync;
  // In rows with kTellsUnusual, whether unusual bases (forward_scores.h) are expected in all KV
  // tiles of this tile of queries, since many of the last one had some. All warps of a warpgroup
  // expect the same: they must come to the same WGMMAs.
  bool expects_unusual = false;
  int32_t unusual_tiles = 0;  // KV tiles so far with such bases
  uint32_t tile_number = 1;   // tiles of queries so far that another one followed, and this one

  CUTE_DEVICE ForwardCompute(ForwardArguments const& arguments, SharedMemory& shared, int warpgroup,
                             int thread)
      : arguments(arguments),
        shared(shared),
        warpgroup(warpgroup),
        thread(thread),
        scores(arguments, warpgroup, thread),
        sync(shared, warpgroup, thread) {}

  CUTE_DEVICE void run() {
    if (warpgroup == Traits::kConsumers - 1) {
      sync.pass_turn();  // the first turn is warpgroup 0's
    }
    while (true) {
      ForwardTile const& tile = sync.tiles.wait();
      if (tile.is_end()) {
        await_output_boxes<Traits>(thread);
        return;
      }
      if (!tile.sees_keys()) {
        store_empty<Row>(arguments, tile, m_offset(), thread);
      } else if (is_idle(tile)) {
        sync.pass_tile(tile);
      } else {
        compute();
      }
      if constexpr (kCombinesSplits<Row>) {
        if (has_splits(arguments.params)) {
          end_split<Row>(arguments, sync.tiles.tile(), m_offset(), thread);
        }
      }
      sync.tiles.release(sync.arrives());
    }
  }

 private:
  // Computes this tile, and the tiles after it up to the next one that this warpgroup does not
  // compute: between those the tensor cores do not wait for it.
  CUTE_DEVICE void compute() {
    cute::clear(tOrO);
    expects_unusual = false;
    ForwardTile const& tile = sync.tiles.tile();
    scores.begin(tile);
    sync.skip_hidden_keys(tile);
    sync.wait_for_query();
    sync.wait_for_keys();
    scores.place(tile, tile.walks[warpgroup].end - 1);
    start_scores();
    cute::warpgroup_wait<0>();
    while (true) {
      walk_kv_tiles(first_probabilities());
      ForwardTile const& next = sync.tiles.wait_for_next();
      if (next.is_end() || !next.sees_keys() || is_idle(next) || ends_split()) {
        break;
      }
      change_tile(next);
    }
    last_output();
  }

  // Whether a split of a tile has to be ended before the next tile begins: where it may have to
  // combine others, it does so in one place of the code, run().
  CUTE_DEVICE bool ends_split() const {
    return kCombinesSplits<Row> && has_splits(arguments.params);
  }

  // Whether the sequence ends before this warpgroup's queries of the tile.
  CUTE_DEVICE bool is_idle(ForwardTile const& tile) const {
    return tile.m_begin + arguments.packing.query(m_offset()) >= tile.sequence.seqlen_q;
  }

  // First row of this warpgroup in its tile.
  CUTE_DEVICE int m_offset() const { return scores.m_offset(); }

  // Visits all KV tiles but the first, which exponentiate() has seen; `usual` is what it returned.
  CUTE_DEVICE void walk_kv_tiles(bool usual) {
    ForwardTile const& tile = sync.tiles.tile();
    KvTiles const walk = tile.walks[warpgroup];
    if (walk.end < tile.kv.end) {
      sync.skip_hidden_values();
    }
    // A split may begin behind the first KV tile without a mask.
    int32_t const first_full = max_of(walk.begin, walk.full_begin);
    int32_t n_block = walk.end - 1;
    unusual_tiles = 0;
    while (true) {
      if (__builtin_expect(!usual, false)) {
        ++unusual_tiles;
        if (!expects_unusual) {
          scores.exponentiate_unusual(tile, n_block, tOrP);
        }
        scores.drop(tile, n_block, tOrP);
      }
      if (--n_block < walk.begin) {
        sync.release_query_late();
        return;
      }
      // The step for KV tiles with a mask is also the one that expects unusual bases.
      if (walk.masked(n_block) || expects_unusual) {
        bool const masked = !Traits::kTellsUnusual || walk.masked(n_block);
        usual = step<true>(n_block, n_block == walk.begin, masked);
        continue;
      }
      // A loop of its own for KV tiles without a mask: from the last exponential of one to the
      // first product of the next there is no jump but the loop's.
      while (true) {
        usual = step<false>(n_block, n_block == walk.begin, false);
        if (!Traits::kUnmaskedLoop || !usual || n_block <= first_full) {
          break;
        }
        --n_block;
      }
    }
  }

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
    auto const tSrQ_stage = tSrQ(_, _, _, sync.ring_q.stage * Traits::kConsumers + warpgroup);
    auto const tSrK_stage = tSrK(_, _, _, sync.ring_k.stage);
    if constexpr (Traits::kAlibiProduct) {
      typename Traits::MmaPlaces mma_places;
      auto const sPlaces =  // (N, COLS, 1)
          in_shared<typename SharedMemory::SmemLayoutPlaces>(shared.places);
      Tensor tSrPlaces =  // (MMA, MMA_N, MMA_COLS, 1)
          mma_places.get_slice(0).partition_fragment_B(sPlaces);
      start_gemms(mma_places, scores.alibi.fragment, tSrPlaces(_, _, _, 0), mma, tSrQ_stage,
                  tSrK_stage, scores.accumulator);
    } else {
      start_gemm<GMMA::ScaleOut::Zero>(mma, tSrQ_stage, tSrK_stage, scores.accumulator);
    }
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
    if constexpr (Traits::kBiasBesideK) {
      cute::warpgroup_fence_operand(scores.accumulator);
      if constexpr (Traits::kKeyBias) {
        scores.add_bias(tile, shared.key_bias[sync.ring_k.stage]);
        __syncwarp();  // all lanes have read, before one of them releases it with K
      } else {
        scores.add_bias(tile, shared.bias_tile(sync.ring_k.stage));
        end_reads();  // before it is released with K
      }
    }
  }

  // Once S is there: releases its K, and with the tile's last S also Q, unless that comes later.
  CUTE_DEVICE void release_scores(bool last) {
    cute::warpgroup_fence_operand(scores.accumulator);
    sync.release_keys();
    sync.release_query_if(last);
  }

  CUTE_DEVICE void release_output(Ring const& ring_v) {
    cute::warpgroup_fence_operand(tOrO);
    sync.release_values(ring_v);
  }

  // Waits for the O that the V of `ring_v` is part of, and releases this V.
  CUTE_DEVICE void end_output(Ring const& ring_v) {
    // The compiler would move the wait for O above what is to run beside O: the exponentials, or
    // what modifies scores. It leaves them before this one, for the next V.
    if constexpr (!Scores::kStraight) {
      cute::warpgroup_fence_operand(scores.accumulator);
      sync.wait_for_values();
    } else if constexpr (Scores::kModifiesFirst) {
      sync.wait_for_values();
    }
    cute::warpgroup_wait<0>();
    release_output(ring_v);
  }

  // Computes P of a tile's first KV tile. S must be there. Returns what exponentiate() does.
  CUTE_DEVICE bool first_probabilities() {
    ForwardTile const& tile = sync.tiles.tile();
    KvTiles const walk = tile.walks[warpgroup];
    int32_t const n_block = walk.end - 1;
    add_bias(tile);
    release_scores(n_block == walk.begin);
    scores.first(tile, n_block, !walk.masked(n_block));
    bool const usual = scores.template exponentiate<true>(  // there is no output yet
        tile, n_block, expects_unusual, tOrP, [](float) {}, [](auto const&) {});
    if (usual) {
      scores.drop(tile, n_block, tOrP);
    }
    return usual;
  }

  // Visits one KV tile: starts S(n_block) and O(n_block + 1), for which P is there, and turns S
  // into the next P. Returns what scores.exponentiate() does.
  //   kMasked  whether the KV tile may be masked; `masked`, whether it is
  template <bool kMasked>
  CUTE_DEVICE bool step(int32_t n_block, bool last, bool masked) {
    Ring const v = sync.ring_v();
    ForwardTile const& tile = sync.tiles.tile();
    if constexpr (Traits::kSharesSm) {
      sync.wait_for_values();
      start_output(v);
      sync.wait_for_keys();
      end_output(v);
      start_scores();
      cute::warpgroup_wait<0>();
    } else {
      scores.place(tile, n_block);
      sync.wait_for_keys();
      sync.take_turn();
      start_scores();
      sync.wait_for_values();
      start_output(v);
      sync.pass_turn();
      cute::warpgroup_wait<1>();
    }
    add_bias(tile);
    release_scores(last);
    scores.template next<kMasked>(tile, n_block, masked);
    bool const usual = scores.template exponentiate<kMasked>(
        tile, n_block, kMasked && expects_unusual, tOrP,
        [&](float probability) {
          sync.stay_behind(probability);
          if constexpr (!Traits::kSharesSm) {
            end_output(v);
          }
          if constexpr (Traits::kUnmaskedLoop) {
            sync.ask_for_keys();
          }
        },
        [&](auto const& factors) {
          auto rO = output();
          scale_rows(rO, factors);
        });
    if (usual) {
      scores.drop(tile, n_block, tOrP);
    }
    return usual;
  }

  // Starts the last O of one tile and the first S of the next, and stores O while the tensor cores
  // compute S.
  CUTE_DEVICE void change_tile(ForwardTile const& next) {
    Ring const v = sync.ring_v();
    scores.begin(next);
    sync.wait_for_values();
    sync.skip_hidden_keys(next);
    tell_unusual();
    sync.take_turn();
    expects_unusual = has_told_unusual();
    start_output(v);
    sync.wait_for_query();
    sync.wait_for_keys();
    if constexpr (!Traits::kSharesSm) {
      scores.place(next, next.walks[warpgroup].end - 1);
      start_scores();
      sync.pass_turn();
    }
    auto const end = end_softmax(!kCombinesSplits<Row> && has_splits(arguments.params));
    cute::warpgroup_wait<Traits::kSharesSm ? 0 : 1>();
    release_output(v);
    if constexpr (Traits::kSharesSm) {
      start_scores();
    }
    store(end);
    sync.tiles.release(sync.arrives());
    cute::clear(tOrO);
    cute::warpgroup_wait<0>();
  }

  CUTE_DEVICE void last_output() {
    Ring const v = sync.ring_v();
    sync.wait_for_values();
    sync.take_turn();
    start_output(v);
    sync.pass_turn();
    auto const end = end_softmax(has_splits(arguments.params));
    cute::warpgroup_wait<0>();
    release_output(v);
    store(end);
  }

  // Tells the other warps of the warpgroup if more than a quarter of the KV tiles was unusual: to
  // compute these twice takes longer than to expect unusual bases in all. The turn that is taken
  // next orders it before has_told_unusual(). Before the next tile is told of, all warps have read
  // it, since a turn was taken for a second KV tile.
  CUTE_DEVICE void tell_unusual() {
    if constexpr (Traits::kTellsUnusual) {
      KvTiles const walk = sync.tiles.tile().walks[warpgroup];
      int32_t const visited = walk.end - walk.begin;
      if (__builtin_expect(4 * unusual_tiles > visited && visited > 1, false)) {
        unusual_number() = tile_number;
      }
    }
  }
  // Whether a warp has told so of this tile.
  CUTE_DEVICE bool has_told_unusual() {
    if constexpr (Traits::kTellsUnusual) {
      return unusual_number() == tile_number++;
    }
    return false;
  }
  CUTE_DEVICE uint32_t volatile& unusual_number() { return shared.unusual[warpgroup]; }

  CUTE_DEVICE auto output() { return rows_of_output<typename Scores::Softmax>(tOrO); }

  CUTE_DEVICE auto end_softmax(bool is_split) const {
    return sm90::end_softmax<Row>(arguments, sync.tiles.tile(), m_offset(), thread, scores.softmax,
                                  is_split);
  }

  template <class End>
  CUTE_DEVICE void store(End const& end) {
    auto rO = output();
    if constexpr (Traits::kStoresBoxes) {
      if (arguments.stores_boxes) {
        ForwardTile const& tile = sync.tiles.tile();
        scale_rows(rO, end.factors);
        store_output_boxes<Traits>(arguments, tile, shared, warpgroup, thread, tOrO, end.lse);
        return;
      }
    }
    end_tile<Row>(arguments, sync.tiles.tile(), m_offset(), thread, rO, end);
  }
};

}  // namespace cute_attention::sm90
