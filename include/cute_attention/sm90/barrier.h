// sm90/barrier.h: the two kinds of barriers of a warp-specialised kernel, and the ring that
// shared-memory stages form.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/config.hpp>

namespace cute_attention::sm90 {

// An mbarrier in shared memory (PTX ISA, "Parallel Synchronization: mbarrier"). It counts arrivals
// and bytes of a phase; wait(parity) returns once the phase of that parity is complete. Before its
// first phase is complete, waiting for parity 1 returns at once: a producer starts with parity 1, a
// consumer with parity 0.
using Barrier = cutlass::arch::ClusterTransactionBarrier;

// The next stage of a ring of kStages buffers, and the parity of the phase its barriers are in.
template <int kStages>
struct Ring {
  uint32_t stage = 0;
  uint32_t parity = 0;

  CUTE_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Hardware barriers (PTX ISA, "barrier"). 0 is __syncthreads.
enum class NamedBarrier : uint32_t {
  // The tensor cores are warpgroup w's, this plus w: the warpgroup before it arrives, w waits; 256
  // threads.
  kTurn = 1,
};

}  // namespace cute_attention::sm90
