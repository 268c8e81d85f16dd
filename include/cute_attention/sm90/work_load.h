// sm90/work_load.h: the load warp of a backward kernel: its walk over the work of a CTA.
#pragma once

#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/packed_blocks.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/mended_load.h"

namespace cute_attention::sm90 {

// What the load warps of the kernels have in common: they take one piece of work after the other,
// write it to shared memory for the other warps, and load what it needs. `Load` is the class that
// derives from it:
//   first_index(), next_index()  number of the next piece of work, of all that there is
//   work_from(index)             that piece, or the end
//   load_work()                  loads what `work` needs
template <class Work, class SharedMemory, class Load>
struct WorkLoad {
  BackwardArguments const& arguments;
  SharedMemory& shared;
  bool const leader;  // one lane talks to the TMA unit and to the barriers
  MendedLoad mended;
  Work const* work = nullptr;  // what is being loaded
  PackedBlocks blocks;         // of packed sequences

  CUTE_DEVICE WorkLoad(BackwardArguments const& arguments, SharedMemory& shared,
                       PackedBlocks const& blocks)
      : arguments(arguments),
        shared(shared),
        leader(cute::elect_one_sync()),
        mended{shared.landed, leader},
        blocks(blocks) {}

  CUTE_DEVICE void run() {
    Load& load = static_cast<Load&>(*this);
    int32_t index = load.first_index();
    for (int32_t number = 0;; ++number) {
      auto const slot = buffer_of<kWorkSlots>(number);
      Barrier::wait(&shared.work_empty[slot.stage], slot.parity ^ 1);
      Work const next = load.work_from(index);
      if (leader) {
        shared.works[slot.stage] = next;
        Barrier::arrive(&shared.work_full[slot.stage]);
      }
      __syncwarp();  // all lanes see what the leader wrote
      work = &shared.works[slot.stage];
      if (work->is_end()) {
        break;
      }
      load.load_work();
      // The next work is taken only when all loads of this one have been started, so that another
      // CTA may take it if it is free sooner.
      index = load.next_index();
    }
  }

 protected:
  // One more of those that CTAs have taken beside their first.
  CUTE_DEVICE static int32_t take(int32_t* counter) {
    int32_t taken = 0;
    if (lane_of_warp() == 0) {
      taken = atomicAdd(counter, 1);
    }
    return warp_uniform(taken);
  }
};

}  // namespace cute_attention::sm90
