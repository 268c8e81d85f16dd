// core/pending_sums.h: the dQ of one step waits in registers until it is added to its sums in
// global memory.
//
// A kernel adds it during the next step, a few vectors after each group of MMAs: added all at once,
// it would delay the loads from shared memory that come after it.
#pragma once

#include "cute_attention/core/cta_turn.h"
#include "cute_attention/core/global_sum.h"

namespace cute_attention {

// A fragment is added in kShares parts. All threads of the CTA have the same values of the members.
template <int kThreads, int kShares>
struct PendingSums {
  float* block = nullptr;      // the sums to add to; null while nothing waits
  int32_t* counter = nullptr;  // counts the block's turns; null where CTAs add in any order
  int32_t turn = 0;            // which turn is this CTA's
  int32_t ended = 0;           // how many turns had ended when the counter was last read

  // Makes the CTA wait for its turn at the block, and reads the block's counter ahead of time.
  CUTE_DEVICE void set_turn(int32_t* counter_of_block, int32_t turn_of_cta) {
    counter = counter_of_block;
    turn = turn_of_cta;
    ended = ended_turns(counter);
  }

  // Waits for the CTA's turn. Call it before the first share is added.
  CUTE_DEVICE void await() const {
    if (counter != nullptr) {
      await_turn(counter, turn, ended);
    }
  }

  // Adds one share, unless nothing waits.
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

  // Adds all shares of the last step. All threads of the CTA call it.
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

  // Ends the CTA's turn. Call it after the last share, and after a barrier of the CTA behind it.
  CUTE_DEVICE void end(int thread) const {
    if (counter != nullptr && thread == 0) {
      end_turn(counter);
    }
  }
};

}  // namespace cute_attention
