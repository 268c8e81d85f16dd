// sm90/mla_left.h: the consumer warpgroup that computes scores and probabilities, and the left half
// of O.
//
// S(n) is Q K^T with KV tile n, O(n) adds P V. S of the next tile is started right behind O of this
// one, so that the tensor cores wait for nobody but the softmax:
//
//   tensor cores   S(n) |            | O(n) both halves | S(n-1) |              | ...
//   left                | softmax(n) |                           | softmax(n-1) |
//   right                              O(n)                                      O(n-1)
#pragma once

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm90/mla_half.h"

namespace cute_attention::sm90 {

template <class Row>
struct MlaLeft : MlaHalf<Row, kLeft, MlaLeft<Row>> {
  using Base = MlaHalf<Row, kLeft, MlaLeft>;
  using Base::arguments, Base::channel, Base::kTileN, Base::ring, Base::shared, Base::thread,
      Base::tOrO, Base::tOrP;
  using typename Base::Element, typename Base::Ring, typename Base::Rows, typename Base::Softmax,
      typename Base::Traits;

  typename Base::FragmentS tSrS;  // (MMA, MMA_M, MMA_N): S, which the softmax turns into P
  Softmax softmax;
  sm90::Ring<1> ring_q{};

  CUTE_DEVICE MlaLeft(ForwardArguments const& arguments, typename Base::SharedMemory& shared,
                      int thread)
      : Base(arguments, shared, thread), softmax(arguments.params.scale) {}

  CUTE_DEVICE void compute(ForwardTile const& tile) {
    if (!tile.sees_keys()) {
      store_empty<Row>(arguments, tile, 0, thread);
      return;
    }
    cute::clear(tOrO);
    softmax = Softmax(arguments.params.scale);
    Barrier::wait(&shared.query_full, ring_q.parity);
    // In registers. `tile` is in shared memory, where it would be read again behind every barrier,
    // also between P and O.
    KvTiles const kv = tile.kv;
    int32_t n_block = kv.end - 1;
    start_scores<kRope>();
    start_latent_scores();
    end_scores(n_block == kv.begin);
    Rows factors;
    channel.await_empty();
    take<true>(tile, n_block, kv.masked(n_block), factors);
    cute::fill(factors, 1.f);  // O is 0
    channel.send(tOrP, factors);
    while (--n_block >= kv.begin) {
      bool const last = n_block == kv.begin;
      if (kv.masked(n_block)) {
        step<true>(tile, n_block, last);
      } else {
        step<false>(tile, n_block, last);
      }
    }
    last_output(tile);
  }

 private:
  // Starts O of the KV tile before, whose P is there, and S of KV tile n_block, and turns S into P.
  // kMasked: not every query sees every key of the tile. last: no KV tile comes behind it.
  template <bool kMasked>
  CUTE_DEVICE void step(ForwardTile const& tile, int32_t n_block, bool last) {
    Ring const before = ring;
    this->start_output();
    ring.advance();
    start_scores<kRope>();
    cute::warpgroup_wait<1>();  // O is there, and the tensor cores are busy with S
    this->release_output(before);
    start_latent_scores();
    end_scores(last);
    Rows factors;
    channel.await_empty();
    bool const rescale = take<kMasked>(tile, n_block, kMasked, factors);
    if (!rescale) {
      cute::fill(factors, 1.f);
    }
    channel.send(tOrP, factors);
    if (__builtin_expect(rescale, false)) {
      auto rO = this->output();
      scale_rows(rO, factors);
    }
  }

  CUTE_DEVICE void last_output(ForwardTile const& tile) {
    this->start_output();
    auto const end =
        end_softmax<Row>(arguments, tile, 0, thread, softmax, has_splits(arguments.params));
    channel.await_empty();
    channel.send(end.factors);
    cute::warpgroup_wait<0>();
    this->release_output(ring);
    ring.advance();
    this->store(tile, end);
  }

  // Adds the columns of one part to S, as soon as they are there.
  template <Part kPart>
  CUTE_DEVICE void start_scores() {
    using namespace cute;
    this->wait_for(kPart);
    typename Traits::MmaQK mma;
    // Opaque: the descriptors of Q are the same for all KV tiles, and the compiler would keep them
    // in registers, of which there are not enough.
    Tensor sQ =  // (M, COLS, 1)
        make_tensor(make_smem_ptr(opaque(shared.q.data()) + Traits::offset_q(kPart)),
                    typename Traits::template SmemLayoutQ<kPart>{});
    Tensor sK =  // (N, COLS, 1)
        make_tensor(make_smem_ptr(this->part_of_keys(kPart)),
                    typename Traits::template SmemLayoutK<kPart>{});
    CUTE_STATIC_ASSERT_V(size<0>(sK) == Int<kTileN>{});
    CUTE_STATIC_ASSERT_V(size<1>(sQ) == size<1>(sK));  // COLS
    auto const thread_mma = mma.get_slice(0);
    Tensor tSrQ = thread_mma.partition_fragment_A(sQ);  // (MMA, MMA_M, MMA_COLS, 1)
    Tensor tSrK = thread_mma.partition_fragment_B(sK);  // (MMA, MMA_N, MMA_COLS, 1)
    constexpr auto kFirst = kPart == kRope ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
    start_gemm<kFirst>(mma, tSrQ(_, _, _, 0), tSrK(_, _, _, 0), tSrS);
  }
  CUTE_DEVICE void start_latent_scores() {
    start_scores<kLeft>();
    start_scores<kRight>();
  }

  // Waits for S. This warp's MMAs have then read the columns of k, and with the last S of a tile of
  // queries also Q.
  CUTE_DEVICE void end_scores(bool last) {
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(tSrS);
    this->release(ring, kRope);
    if (last) {
      arrive_by_warp(shared.query_empty);
      ring_q.advance();
    }
  }

  // Turns S into P. Returns whether O must be multiplied by `factors`; the warp agrees.
  //   kMayBeHidden  whether scores may be hidden
  template <bool kMayBeHidden>
  CUTE_DEVICE bool take(ForwardTile const& tile, int32_t n_block, bool masked, Rows& factors) {
    using namespace cute;
    if (masked) {
      QueryPacking const& packing = arguments.packing;
      mask_scores_by_side(make_score_tile<kWarpgroupM, kTileN>(
          typename Traits::MmaQK{}, opaque(thread), tSrS, tile.sequence, packing, tile.m_begin,
          n_block * kTileN));
    }
    Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));  // (ROWS, COLS)
    bool const rescale = softmax.template take<kMayBeHidden>(rS, factors);
    convert_into(tSrS, tOrP);
    return rescale;
  }
};

}  // namespace cute_attention::sm90
