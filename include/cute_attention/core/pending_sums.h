// core/pending_sums.h: a step's share of dQ, waiting in registers until it is added to the sums in
// global memory.
//
// It is added under the products of the next step, a few vectors at a time: all at once, the
// additions would hold up the loads of shared memory behind them.
#pragma once

#include "cute_attention/core/cta_turn.h"
#include "cute_attention/core/global_sum.h"

namespace cute_attention {

// A fragment goes in kShares parts. All members are the same in all threads of the CTA.
template <int kThreads, int kShares>
struct PendingSums {
  float* block = nullptr;      // of the sums; null while nothing waits
  int32_t* counter = nullptr;  // of the block's turns; null where additions come in any order
  int32_t turn = 0;
  int32_t ended = 0;

  CUTE_DEVICE void set_turn(int32_t* counter_of_block, int32_t turn_of_cta) {
    counter = counter_of_block;
    turn = turn_of_cta;
    ended = ended_turns(counter);
  }

  // Before the first share.
  CUTE_DEVICE void await() const {
    if (counter != nullptr) {
      await_turn(counter, turn, ended);
    }
  }

  template <class Fragment>
  CUTE_DEVICE void add(Fragment const& fragment, int share, int thread) const {
    using namespace cute;
    constexpr int kVectors = decltype(size(fragment))::value / kSumVector;
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      if (v * kShares / kVectors == share) {
        add_vector<kThreads>(block, fragment, v, thread, block != nullptr);
      }
    }
  }

  // All shares of the last step. All threads of the CTA call it.
  template <class Fragment>
  CUTE_DEVICE void finish(Fragment const& fragment, int thread) const {
    await();
    CUTE_UNROLL
    for (int share = 0; share < kShares; ++share) {
      add(fragment, share, thread);
    }
    __syncthreads();
    end(thread);
  }

  // Some time after the last share, behind a barrier of the CTA.
  CUTE_DEVICE void end(int thread) const {
    if (counter != nullptr && thread == 0) {
      end_turn(counter);
    }
  }
};

}  // namespace cute_attention
