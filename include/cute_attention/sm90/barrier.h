// sm90/barrier.h: the two kinds of barriers of a warp-specialised kernel, and the ring of stages in
// shared memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/config.hpp>

#include "cute_attention/core/warp.h"

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

// The buffer of number `number` among those that take the kStages buffers of a ring one after the
// other.
template <int kStages>
CUTE_DEVICE Ring<kStages> buffer_of(int32_t number) {
  return {uint32_t(number) % kStages, uint32_t(number) / kStages % 2};
}

// One lane arrives for its warp, which has synchronised where other lanes' work matters.
CUTE_DEVICE void arrive_by_warp(uint64_t& barrier) {
  if (lane_of_warp() == 0) {
    Barrier::arrive(&barrier);
  }
}

// What this thread has written to shared memory comes before what WGMMA and TMA read there once it
// has arrived at a barrier (PTX ISA, "Async proxy"), and what it has read before what they write.
// CUTLASS's function does not tell the compiler that it concerns memory, so that nvcc may move
// plain stores behind it.
CUTE_DEVICE void fence_shared_memory() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Call it when the lanes of a warp have read a buffer by loads, ldmatrix or others, before one of
// them arrives for the warp and TMA writes the next data there. An arrival waits for no load: while
// the tensor cores read shared memory as fast as they can, a load may take longer than the arrival,
// the load warp and the copy together. Without this, the forward with a bias at head dim 256 read
// the last 8 columns of some tiles of the bias when those of a later tile were there (seen on an
// H200).
CUTE_DEVICE void end_reads() {
  fence_shared_memory();
  __syncwarp();
}

// The numbers of hardware barriers (PTX ISA, "barrier"), 1 to 7: CUTLASS adds 8, and there are 16.
// __syncthreads() uses number 0.
enum class NamedBarrier : uint32_t {
  // Barrier kTurn + w says: the tensor cores are warpgroup w's. The 128 threads of the warpgroup
  // whose turn is before w's arrive there, and the 128 threads of w wait.
  kTurn = 1,
  // Barrier kSplit + w: the 128 threads of warpgroup w have written what a split has of their rows.
  kSplit = 4,
  // The 256 threads that have parts of a sum are done with shared memory (grad_bias_compute.h).
  kSum = 7,
  // Barrier kGradS + w: the 128 threads of warpgroup w have written their dS (backward_chunks.h).
  // Kernels with turns do not have it.
  kGradS = 1,
};

}  // namespace cute_attention::sm90
