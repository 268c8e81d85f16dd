#include "emulator/memory.h"

#include <algorithm>
#include <cstring>

namespace cute_attention::emulator {
namespace {

constexpr uint64_t kLowestAddress = 4096;
constexpr uint64_t kOutside = ~uint64_t(0);  // of shared memory

uint64_t extended(uint64_t value, uint32_t bytes, bool is_signed) {
  if (bytes == 8) return value;
  int const shift = 64 - 8 * static_cast<int>(bytes);
  return is_signed ? static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift)
                   : value << shift >> shift;
}

// One register, or those of a vector.
Operand const& part_of(Operand const& operand, uint32_t i) {
  return operand.kind == OperandKind::kVector ? operand.parts[i] : operand;
}
uint32_t parts_of(Operand const& operand) {
  return operand.kind == OperandKind::kVector ? static_cast<uint32_t>(operand.parts.size()) : 1;
}

// Where a place is in the CTA's shared memory, which generic addresses reach, too; else kOutside.
uint64_t in_shared(Warp const& warp, uint8_t const* place, uint64_t bytes) {
  uint64_t const address = uint64_t(place - warp.cta->shared);
  bool const fits = address <= UINT32_MAX && warp.cta->contains(uint32_t(address), bytes);
  return fits ? address : kOutside;
}

void load(Warp& warp, Instruction const& instruction, uint32_t mask) {
  Operand const& target = instruction.operands[0];
  uint32_t const parts = parts_of(target), size = instruction.size;
  uint8_t const* places[kLanes];
  bool is_shared = false;
  for_lanes(mask, [&](int lane) {
    uint64_t const address = address_of(warp, instruction.operands[1], lane);
    uint64_t const bytes = uint64_t(size) * parts;
    places[lane] = bytes_at(warp, instruction, instruction.space, address, bytes, lane);
    is_shared |= in_shared(warp, places[lane], bytes) != kOutside;
  });
  Warp* const self = &warp;
  Instruction const* const what = &instruction;
  auto const read = [=] {
    for_lanes(mask, [&](int lane) {
      for (uint32_t i = 0; i < parts; ++i) {
        uint64_t value = 0;
        std::memcpy(&value, places[lane] + i * size, size);
        set_value(*self, part_of(what->operands[0], i), lane,
                  extended(value, size, what->mode != 0));
      }
    });
  };
  if (is_shared) {
    load_shared(warp, instruction, read);
  } else {
    read();
  }
}

// Of a number that another CTA may have to write first: the warp may load it again and again until
// then, so the others have their turns.
void load_of_others(Warp& warp, Instruction const& instruction, uint32_t mask) {
  load(warp, instruction, mask);
  warp.ends_turn = true;
}

void store(Warp& warp, Instruction const& instruction, uint32_t mask) {
  Operand const& values = instruction.operands[1];
  uint32_t const parts = parts_of(values), size = instruction.size;
  for_lanes(mask, [&](int lane) {
    uint64_t const address = address_of(warp, instruction.operands[0], lane);
    uint64_t const bytes = uint64_t(size) * parts;
    uint8_t* const place = bytes_at(warp, instruction, instruction.space, address, bytes, lane);
    uint64_t const shared = in_shared(warp, place, bytes);
    if (shared != kOutside) store_shared(warp, shared, size * parts);
    auto const write = [&] {
      for (uint32_t i = 0; i < parts; ++i) {
        uint64_t const value = value_of(warp, part_of(values, i), lane);
        std::memcpy(place + i * size, &value, size);
      }
    };
    if (shared == kOutside && instruction.space != kLocal) {
      warp.grid->write_global(place, bytes, write);
    } else {
      write();
    }
  });
}

enum AtomicOperation : uint32_t {
  kAdd,
  kExchange,
  kMin,
  kMax,
  kCompareAndSwap,
  kAnd,
  kOr,
  kXor,
  kInc,
  kDec
};
constexpr char const* kAtomicNames[] = {"add", "exch", "min", "max", "cas",
                                        "and", "or",   "xor", "inc", "dec"};

template <class T>
T combined(uint32_t operation, T old, T a, T b) {
  switch (operation) {
    case kAdd:
      return static_cast<T>(old + a);
    case kExchange:
      return a;
    case kMin:
      return std::min(old, a);
    case kMax:
      return std::max(old, a);
    case kCompareAndSwap:
      return old == a ? b : old;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (operation) {
      case kAnd:
        return old & a;
      case kOr:
        return old | a;
      case kXor:
        return old ^ a;
      case kInc:
        return old >= a ? 0 : old + 1;
      case kDec:
        return old == 0 || old > a ? a : old - 1;
    }
  }
  return old;
}

// atom d, [address], a, b; red [address], a. Other warps run between instructions alone, so that
// each is atomic.
template <class T>
void atomic(Warp& warp, Instruction const& instruction, uint32_t mask) {
  bool const returns = instruction.words[0] == "atom";
  auto const& operands = instruction.operands;
  size_t const at = returns ? 1 : 0;
  Operand const& a = operands[at + 1];
  uint32_t const parts = parts_of(a);
  for_lanes(mask, [&](int lane) {
    uint64_t const address = address_of(warp, operands[at], lane);
    uint8_t* const place =
        bytes_at(warp, instruction, instruction.space, address, sizeof(T) * parts, lane);
    if (instruction.space == kShared) store_shared(warp, address, sizeof(T) * parts);
    bool const is_global = in_shared(warp, place, sizeof(T) * parts) == kOutside;
    for (uint32_t i = 0; i < parts; ++i) {
      T old;
      std::memcpy(&old, place + i * sizeof(T), sizeof(T));
      T const first = from_slot<T>(static_cast<Slot<T>>(value_of(warp, part_of(a, i), lane)));
      T const second =
          instruction.mode == kCompareAndSwap
              ? from_slot<T>(static_cast<Slot<T>>(value_of(warp, operands[at + 2], lane)))
              : T();
      T const result = combined(instruction.mode, old, first, second);
      uint8_t* const number = place + i * sizeof(T);
      auto const write = [&] { std::memcpy(number, &result, sizeof(T)); };
      if (is_global) {
        warp.grid->write_global(number, sizeof(T), write);
      } else {
        write();
      }
      if (returns) set_value(warp, part_of(operands[0], i), lane, to_slot(old));
    }
  });
}

Execute decode_atomic(Instruction& instruction) {
  bool known = false;
  for (uint32_t i = 0; i < std::size(kAtomicNames); ++i) {
    if (!instruction.has(kAtomicNames[i])) continue;
    instruction.mode = i;
    known = true;
  }
  std::string const& type = instruction.words.back();
  if (!known || instruction.has("async")) return nullptr;
  if (type == "f32") return atomic<float>;
  if (type == "u32" || type == "b32") return atomic<uint32_t>;
  if (type == "s32") return atomic<int32_t>;
  if (type == "u64" || type == "b64") return atomic<uint64_t>;
  return nullptr;
}

}  // namespace

Space space_of(Instruction const& instruction) {
  for (std::string const& word : instruction.words) {
    if (word == "global" || word == "const") return kGlobal;
    if (word == "shared" || word == "shared::cta" || word == "shared::cluster") return kShared;
    if (word == "param" || word == "param::entry") return kParameter;
    if (word == "local") return kLocal;
  }
  return kGeneric;
}

uint64_t base_of(Warp const& warp, uint32_t space, int lane) {
  switch (space) {
    case kShared:
      return reinterpret_cast<uint64_t>(warp.cta->shared);
    case kParameter:
      return reinterpret_cast<uint64_t>(warp.grid->parameters);
    case kLocal:
      return reinterpret_cast<uint64_t>(warp.local.get() + lane * warp.local_bytes_per_lane);
    default:
      return 0;
  }
}

uint8_t* bytes_at(Warp& warp, Instruction const& instruction, uint32_t space, uint64_t address,
                  uint64_t bytes, int lane) {
  if (space == kShared) address = static_cast<uint32_t>(address);
  bool const is_inside = space == kShared ? warp.cta->contains(address, bytes)
                         : space == kGeneric || space == kGlobal ? address >= kLowestAddress
                                                                 : true;
  if (!is_inside || address % bytes != 0) {
    fail("%s: %s of %llu bytes at address 0x%llx, which is %s", where(warp).c_str(),
         instruction.opcode().c_str(), static_cast<unsigned long long>(bytes),
         static_cast<unsigned long long>(address), is_inside ? "not a multiple" : "outside");
  }
  return reinterpret_cast<uint8_t*>(base_of(warp, space, lane) + address);
}

void store_shared(Warp& warp, uint64_t address, uint32_t bytes) {
  for (Warp& other : warp.cta->warps) other.finish_loads();
  warp.cta->wrote(warp, static_cast<uint32_t>(address), bytes);
}

void load_shared(Warp& warp, Instruction const& instruction, Job job) {
  if (warp.grid->is_strict()) {
    warp.loads.push_back({instruction.registers, std::move(job)});
  } else {
    job();
  }
}

Execute decode_memory(Instruction& instruction) {
  std::string const& name = instruction.words[0];
  if (name != "ld" && name != "st" && name != "atom" && name != "red") return nullptr;
  std::string const& type = instruction.words.back();
  instruction.size = bytes_of(type);
  instruction.space = space_of(instruction);
  if (name == "atom" || name == "red") return decode_atomic(instruction);
  instruction.mode = type[0] == 's';  // the sign fills a wider register
  if (name == "st") return store;
  bool const is_of_others =
      instruction.has("relaxed") || instruction.has("acquire") || instruction.has("volatile");
  return is_of_others && instruction.space == kGlobal ? load_of_others : load;
}

}  // namespace cute_attention::emulator
