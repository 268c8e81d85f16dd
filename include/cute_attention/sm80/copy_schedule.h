// sm80/copy_schedule.h: when the forward starts the copies of K and V, and when it waits for them.
//
// A tile of keys n is needed in two places: its K before S = Q K^T, its V before O += P V. At both,
// all threads wait until the tile is there. Behind this wait they are done with all tiles that were
// needed before, so that the copy of a later tile into the place of one of these can start:
//
//                        at S(n)               at O(n)
//   eager, 1 buffer      wait, start V(n)      wait, start K(n-1)
//   eager, 2 buffers     wait, start K(n-1)    wait, start V(n-1)
//   late, 1 buffer       start K(n), wait      start V(n), wait
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include <type_traits>

#include "cute_attention/study.h"

namespace cute_attention::sm80 {

// load_k and load_v start the copy of the next tile of K and of V, as one group each. Their
// argument is std::true_type for the tile where the walk begins. `first` says whether tile n is
// that one, `more` whether another follows it.
template <Loads kLoads, int kStages>
struct CopySchedule {
  static constexpr bool kLate = kLoads == Loads::Late;
  static_assert(kStages == 1 || (kStages == 2 && !kLate));

  // Before the first tile.
  template <class LoadK, class LoadV>
  CUTE_DEVICE static void begin(LoadK&& load_k, LoadV&& load_v) {
    if constexpr (!kLate) {
      load_k(std::true_type{});
    }
    if constexpr (kStages == 2) {
      load_v(std::true_type{});
    }
  }

  // Afterwards K(n) is there, and with the first one all that was copied before it.
  template <class LoadK, class LoadV>
  CUTE_DEVICE static void at_scores(bool first, bool more, LoadK&& load_k, LoadV&& load_v) {
    if constexpr (kLate) {
      start(first, load_k);
    }
    await_tile();
    if constexpr (kStages == 2) {
      start_next(more, load_k);
    } else if constexpr (!kLate) {
      start(first, load_v);
    }
  }

  // Afterwards V(n) is there, and what all threads wrote to shared memory before.
  template <class LoadK, class LoadV>
  CUTE_DEVICE static void at_output(bool first, bool more, LoadK&& load_k, LoadV&& load_v) {
    if constexpr (kLate) {
      start(first, load_v);
    }
    await_tile();
    if constexpr (kStages == 2) {
      start_next(more, load_v);
    } else if constexpr (!kLate) {
      start_next(more, load_k);
    }
  }

 private:
  // With two buffers the group that was started last is that of a tile that is not needed yet.
  CUTE_DEVICE static void await_tile() {
    cute::cp_async_wait<kStages - 1>();
    __syncthreads();
  }

  template <class Load>
  CUTE_DEVICE static void start(bool first, Load&& load) {
    if (first) {
      load(std::true_type{});
    } else {
      load(std::false_type{});
    }
  }

  template <class Load>
  CUTE_DEVICE static void start_next(bool more, Load&& load) {
    if (more) {
      load(std::false_type{});
    } else if constexpr (kStages == 2) {
      cute::cp_async_fence();  // a group without copies: await_tile() counts groups
    }
  }
};

}  // namespace cute_attention::sm80
