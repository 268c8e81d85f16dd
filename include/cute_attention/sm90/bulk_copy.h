// sm90/bulk_copy.h: bulk copies from shared to global memory, and what waits for them (PTX ISA,
// "cp.async.bulk"). A thread waits for those that it has started itself.
#pragma once

#include <cute/arch/util.hpp>
#include <cute/config.hpp>

namespace cute_attention::sm90 {

// Ends the group of copies that this thread has started since the last one.
CUTE_DEVICE void end_bulk_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Starts adding `bytes` of floats in shared memory to global memory, or storing them there, as a
// group of its own (PTX ISA, "cp.reduce.async.bulk" and "cp.async.bulk"). Both addresses and
// `bytes` are multiples of 16.
CUTE_DEVICE void start_bulk_store(float* global, float const* shared, int32_t bytes) {
  uint32_t const address = cute::cast_smem_ptr_to_uint(shared);
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(address), "r"(bytes)
               : "memory");
  end_bulk_group();
}
CUTE_DEVICE void start_bulk_add(float* global, float const* shared, int32_t bytes) {
  uint32_t const address = cute::cast_smem_ptr_to_uint(shared);
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(address), "r"(bytes)
      : "memory");
  end_bulk_group();
}
// Waits until all that this thread has started has been read from shared memory.
CUTE_DEVICE void await_bulk_reads() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// What other threads wrote, and this thread has seen, comes before the bulk additions that it
// starts (PTX ISA, "membar, fence": proxies).
CUTE_DEVICE void fence_bulk_adds() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
// Waits until it has been added, or stored.
CUTE_DEVICE void await_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace cute_attention::sm90
