// sm90/backward_states.h: what the sm90 backward keeps in the workspace behind delta and the LSE:
// counters, and the states of the sums of dQ.
#pragma once

#include "cute_attention/core/address.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/kernel_library.h"

namespace cute_attention::sm90 {

// The counters of the blocks of keys, and of the works of the gradient of a bias, that CTAs have
// taken: behind delta and the LSE in the workspace.
constexpr int kCountersWithSums = 2;
CUTE_HOST_DEVICE int32_t* next_tile(BackwardParams const& params) {
  return reinterpret_cast<int32_t*>(params.delta + 2 * numbers_size<true>(params));
}

// Where a call has many sums of dQ and few blocks of keys add to each, they are not set to zero.
// Who first has something to add to a part of a block stores it, and the others add when it is
// there. A warp claims the store only when it has the numbers, so that nobody waits for anything
// but a store under way. Where many blocks add to a sum, its zeros cost little, and the state that
// each reads more. Where there are few sums their zeros stay in the L2 cache, and the blocks of
// keys of a head, which begin at the same time, wait for one another (docs/hopper_backward.md).
template <class Traits>
bool stores_first(BackwardParams const& params, DeviceInfo const& device) {
  constexpr int64_t kNumbersOfMultiprocessor = 1 << 15;
  int64_t const numbers =
      grad_q_blocks(params, Traits::kTileM).count() * (Traits::kTileM * Traits::kHeadDim);
  return Traits::kStoresFirst && params.seqlen_k <= 8 * Traits::kTileN &&
         numbers > kNumbersOfMultiprocessor * device.multiprocessors;
}
constexpr int32_t kSumNotBegun = 0;  // as the kernel before leaves it
constexpr int32_t kSumBegun = 1;     // somebody stores the first numbers
constexpr int32_t kSumWritten = 2;   // they are there

// How many states there are.
template <class Traits>
int64_t count_sum_states(BackwardParams const& params, DeviceInfo const& device) {
  return stores_first<Traits>(params, device)
             ? grad_q_blocks(params, Traits::kTileM).count() * Traits::kConsumers
             : 0;
}

// The states of the parts of all blocks: (blocks, parts); nullptr where sums begin at zeros.
template <class Traits>
int32_t* sum_states(BackwardParams const& params, DeviceInfo const& device) {
  return stores_first<Traits>(params, device) ? next_tile(params) + kCountersWithSums : nullptr;
}

// PTX ISA, "ld", "st" and "Memory Consistency Model": what was written before the number was can be
// read by who has read the number.
CUTE_DEVICE int32_t load_acquire(int32_t const* place) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(place) : "memory");
  return value;
}
CUTE_DEVICE void store_release(int32_t* place, int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

CUTE_DEVICE void add_release(int32_t* place, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(place), "r"(value) : "memory");
}

// Whether this thread is to store the first numbers, of all that ask. If not, they are there when
// it returns.
CUTE_DEVICE bool claims_first(int32_t* state) {
  if (atomicCAS(state, kSumNotBegun, kSumBegun) == kSumNotBegun) {
    return true;
  }
  while (load_acquire(state) != kSumWritten) {
  }
  return false;
}

}  // namespace cute_attention::sm90
