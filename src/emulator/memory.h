// emulator/memory.h: where an instruction's address points to.
#pragma once

#include <cstdint>

#include "emulator/lanes.h"

namespace cute_attention::emulator {

// State spaces. Global and generic addresses are those of this process; one of shared memory counts
// from 0 on, of a parameter or a local variable from its first byte on.
enum Space : uint32_t { kGeneric, kGlobal, kShared, kParameter, kLocal };

Space space_of(Instruction const& instruction);

// What is to be added to an address of a space so that it is one of this process.
uint64_t base_of(Warp const& warp, uint32_t space, int lane);

// The address that [base + offset] is in one lane.
inline uint64_t address_of(Warp const& warp, Operand const& operand, int lane) {
  return value_of(warp, operand.parts[0], lane) + operand.value;
}

// The bytes there, of which the kernel may read or write `bytes`, a power of 2. Fails where the
// address is not a multiple of it, or outside of shared memory.
uint8_t* bytes_at(Warp& warp, Instruction const& instruction, uint32_t space, uint64_t address,
                  uint64_t bytes, int lane);

// To be called for each generic store to shared memory: loads of it that are on their way come
// first.
void store_shared(Warp& warp, uint64_t address, uint32_t bytes);

// Does a load of shared memory, or has it wait until its result is needed.
void load_shared(Warp& warp, Instruction const& instruction, Job job);

}  // namespace cute_attention::emulator
