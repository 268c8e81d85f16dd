// sm90/forward_sync.h: how a consumer warpgroup keeps in step with the load warp and with the other
// consumers: it waits for buffers and releases them, and takes turns at the tensor cores.
#pragma once

#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/tile_reader.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardSync {
  using Traits = ForwardTraits<Row>;
  using SharedMemory = typename Traits::SharedMemory;
  using Ring = sm90::Ring<Traits::kStages>;

  SharedMemory& shared;
  int const warpgroup;  // of the consumers
  int const thread;     // of the warpgroup

  Ring ring_k{};
  bool keys_there = false;  // the next K, for sure
  sm90::Ring<Traits::kStagesQ> ring_q{};
  TileReader<SharedMemory> tiles;

  CUTE_DEVICE ForwardSync(SharedMemory& shared, int warpgroup, int thread)
      : shared(shared), warpgroup(warpgroup), thread(thread), tiles{shared} {}

  // Whether this thread arrives at barriers for its warp.
  CUTE_DEVICE bool arrives() const { return thread % 32 == 0; }

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

  CUTE_DEVICE void wait_for_query() {
    Barrier::wait(&shared.query_full[ring_q.stage][warpgroup], ring_q.parity);
  }
  CUTE_DEVICE void wait_for_keys() {
    if (!keys_there) {
      Barrier::wait(&shared.key_full[ring_k.stage], ring_k.parity);
    }
    keys_there = false;
  }
  // Asks whether the next K is there, so that the wait for it need not ask.
  CUTE_DEVICE void ask_for_keys() {
    keys_there = Barrier::test_wait(&shared.key_full[ring_k.stage], ring_k.parity, 1);
  }
  // What follows in the source stays behind the exponential that has given `probability`. ptxas
  // moves the wait for O ahead of exponentials that stand before it, but not ahead of an arrival:
  // this one is never made, since no exponential has these bits.
  CUTE_DEVICE void stay_behind(float probability) {
    if constexpr (Traits::kReleasesQueryLate) {
      asm volatile(
          "{\n"
          ".reg .pred is_made;\n"
          "setp.eq.u32 is_made, %0, 0x7f800001;\n"
          "@is_made mbarrier.arrive.shared::cta.b64 _, [%1];\n"
          "}" ::"r"(reinterpret_cast<uint32_t const&>(probability)),
          "r"(cute::cast_smem_ptr_to_uint(&shared.key_empty[0]))
          : "memory");
    }
  }
  // Waits for the V of the KV tile whose P was computed last. Its K must have been released.
  CUTE_DEVICE void wait_for_values() { wait_for_values(ring_v()); }

  CUTE_DEVICE void release_query() {
    release(shared.query_empty[ring_q.stage][warpgroup]);
    ring_q.advance();
  }
  // Behind the last step of a tile.
  CUTE_DEVICE void release_query_late() {
    if constexpr (Traits::kReleasesQueryLate) {
      release_query();
    }
  }
  // Stands between S and its softmax, in each step. The compiler schedules no maxima and
  // exponentials across a branch; where they gain by that (ForwardTraits), there is none.
  CUTE_DEVICE void release_query_if(bool last) {
    if constexpr (Traits::kReleasesQueryLate) {
      return;
    } else if constexpr (Traits::kStraightRelease) {
      if (last && arrives()) {
        Barrier::arrive(&shared.query_empty[ring_q.stage][warpgroup]);
      }
      auto next = ring_q;
      next.advance();
      ring_q.stage = last ? next.stage : ring_q.stage;
      ring_q.parity = last ? next.parity : ring_q.parity;
    } else if (last) {
      release_query();
    }
  }
  CUTE_DEVICE void release_keys() {
    release(shared.key_empty[ring_k.stage]);
    ring_k.advance();
  }
  CUTE_DEVICE void release_values(Ring const& ring_v) { release(shared.value_empty[ring_v.stage]); }

  // The stage of V to read next: V is read one KV tile after K.
  CUTE_DEVICE Ring ring_v() const { return before(ring_k); }

  // For a tile that only other warpgroups compute: releases its Q, K and V unread, and takes and
  // passes as many turns as they do.
  CUTE_DEVICE void pass_tile(ForwardTile const& tile) {
    wait_for_query();
    release_query();
    for (int32_t count = tile.kv.end - tile.kv.begin; count > 0; --count) {
      wait_for_keys();
      release_keys();
      skip_values(ring_v());
    }
  }

  // If only other warpgroups need the last KV tile, releases its K unread; skip_hidden_values()
  // does so with its V, a turn later.
  CUTE_DEVICE void skip_hidden_keys(ForwardTile const& tile) {
    if (tile.walks[warpgroup].end < tile.kv.end) {
      wait_for_keys();
      release_keys();
    }
  }
  CUTE_DEVICE void skip_hidden_values() { skip_values(before(ring_v())); }

 private:
  // Tells the load warp that this warp's MMAs have read a buffer.
  CUTE_DEVICE void release(uint64_t& empty) {
    if (arrives()) {
      Barrier::arrive(&empty);
    }
  }

  CUTE_DEVICE static Ring before(Ring const& ring) {
    bool const wraps = ring.stage == 0;
    return {wraps ? Traits::kStages - 1 : ring.stage - 1, ring.parity ^ uint32_t(wraps)};
  }

  CUTE_DEVICE void wait_for_values(Ring const& ring_v) {
    Barrier::wait(&shared.value_full[ring_v.stage], ring_v.parity);
  }

  // Releases a V unread, and takes and passes a turn: all warpgroups must take as many turns.
  CUTE_DEVICE void skip_values(Ring const& ring_v) {
    wait_for_values(ring_v);
    release_values(ring_v);
    take_turn();
    pass_turn();
  }
};

}  // namespace cute_attention::sm90
