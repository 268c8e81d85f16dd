// Branches, and what lanes of a warp do together.
#include <algorithm>

#include "emulator/lanes.h"

namespace cute_attention::emulator {
namespace {

void go_to(Warp& warp, uint32_t mask, int target) {
  for_lanes(mask, [&](int lane) { warp.at[lane] = target; });
  warp.has_moved = true;
}

void branch(Warp& warp, Instruction const& instruction, uint32_t mask) {
  go_to(warp, mask, instruction.target);
}

void branch_by_table(Warp& warp, Instruction const& instruction, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    warp.at[lane] = instruction.targets.at(value_of(warp, instruction.operands[0], lane));
  });
  warp.has_moved = true;
}

void leave(Warp& warp, Instruction const&, uint32_t mask) {
  warp.finish_loads();
  warp.alive &= ~mask;
  warp.has_moved = true;
}

void sleep(Warp& warp, Instruction const&, uint32_t) {
  warp.ends_turn = true;
  warp.sleeps = true;
}

void stop(Warp& warp, Instruction const& instruction, uint32_t) {
  fail("%s: %s", where(warp).c_str(), instruction.opcode().c_str());
}

uint32_t members(Warp const& warp, Operand const& operand, uint32_t mask) {
  return static_cast<uint32_t>(value_of(warp, operand, first_lane(mask)));
}

enum ShuffleMode : uint32_t { kUp, kDown, kButterfly, kIndex };

// shfl.sync d|p, a, b, c, members
void shuffle(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  if (!are_together(warp, mask, members(warp, operands[4], mask))) return;
  uint32_t values[kLanes], in_range = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    values[lane] = static_cast<uint32_t>(value_of(warp, operands[1], lane));
  }
  bool const has_predicate = operands[0].kind == OperandKind::kVector;
  Operand const& target = has_predicate ? operands[0].parts[0] : operands[0];
  for_lanes(mask, [&](int lane) {
    int const b = static_cast<int>(value_of(warp, operands[2], lane) & 31);
    uint32_t const c = static_cast<uint32_t>(value_of(warp, operands[3], lane));
    int const segment = c >> 8 & 31, clamp = c & 31;
    int const last = (lane & segment) | (clamp & ~segment), first = lane & segment;
    int from = lane;
    switch (instruction.mode) {
      case kUp:
        from = lane - b;
        break;
      case kDown:
        from = lane + b;
        break;
      case kButterfly:
        from = lane ^ b;
        break;
      case kIndex:
        from = first | (b & ~segment);
        break;
    }
    bool const is_in_range = instruction.mode == kUp ? from >= last : from <= last;
    in_range |= uint32_t(is_in_range) << lane;
    set_value(warp, target, lane, values[is_in_range ? from : lane]);
  });
  if (has_predicate) set_bits(warp, operands[0].parts[1], mask, in_range);
}

enum VoteMode : uint32_t { kAll, kAny, kUniform, kBallot };

// vote.sync d, p, members
void vote(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  if (!are_together(warp, mask, members(warp, operands[2], mask))) return;
  uint32_t const votes = bits_of(warp, operands[1]) & mask;
  if (instruction.mode == kBallot) {
    for_lanes(mask, [&](int lane) { set_value(warp, operands[0], lane, votes); });
    return;
  }
  bool const all = votes == mask, any = votes != 0;
  bool const result = instruction.mode == kAll ? all : instruction.mode == kAny ? any : all || !any;
  set_bits(warp, operands[0], mask, result ? kAllLanes : 0);
}

// redux.sync d, a, members, of T
template <class T>
void reduce(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  if (!are_together(warp, mask, members(warp, operands[2], mask))) return;
  auto const a = source<T>(warp, operands[1]);
  T result = from_slot<T>(a[first_lane(mask)]);
  for_lanes(mask & (mask - 1), [&](int lane) {
    T const value = from_slot<T>(a[lane]);
    if (instruction.has("add")) result = static_cast<T>(uint32_t(result) + uint32_t(value));
    if (instruction.has("min")) result = std::min(result, value);
    if (instruction.has("max")) result = std::max(result, value);
    if (instruction.has("and")) result &= value;
    if (instruction.has("or")) result |= value;
    if (instruction.has("xor")) result ^= value;
  });
  for_lanes(mask, [&](int lane) { set_value(warp, operands[0], lane, uint32_t(result)); });
}

// elect.sync d|p, members
void elect(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  if (!are_together(warp, mask, members(warp, operands[1], mask))) return;
  Operand const& target = operands[0];
  for_lanes(mask, [&](int lane) { set_value(warp, target.parts[0], lane, first_lane(mask)); });
  set_bits(warp, target.parts[1], mask, 1u << first_lane(mask));
}

void synchronise_warp(Warp& warp, Instruction const& instruction, uint32_t mask) {
  are_together(warp, mask, members(warp, instruction.operands[0], mask));
}

void active_mask(Warp& warp, Instruction const& instruction, uint32_t mask) {
  for_lanes(mask, [&](int lane) { set_value(warp, instruction.operands[0], lane, mask); });
}

// The fence between generic accesses and those of WGMMA and TMA.
void fence_proxies(Warp& warp, Instruction const&, uint32_t) { warp.cta->fence(warp); }

// griddepcontrol.launch_dependents
void start_kernel_after(Warp& warp, Instruction const&, uint32_t) {
  warp.grid->start_kernel_after();
}

// griddepcontrol.wait
void await_kernel_before(Warp& warp, Instruction const&, uint32_t mask) {
  if (warp.grid->awaited == nullptr) return;
  for_lanes(mask, [&](int lane) { warp.wait[lane] = Wait::kKernelBefore; });
  warp.has_moved = true;
}

uint32_t mode_among(Instruction const& instruction, std::initializer_list<char const*> names) {
  uint32_t mode = 0;
  for (char const* name : names) {
    if (instruction.has(name)) return mode;
    ++mode;
  }
  return mode;
}

}  // namespace

Execute decode_control(Instruction& instruction) {
  std::string const& name = instruction.words[0];
  if (name == "bra") return branch;
  if (name == "brx") return branch_by_table;
  if (name == "ret" || name == "exit") return leave;
  if (name == "call" || name == "trap") return stop;
  if (name == "nanosleep") return sleep;
  if (name == "activemask") return active_mask;
  if (name == "fence" && instruction.has("proxy") && instruction.words.size() > 2 &&
      instruction.words[2].compare(0, 5, "async") == 0) {
    return fence_proxies;
  }
  if (name == "griddepcontrol") {
    return instruction.has("wait") ? await_kernel_before : start_kernel_after;
  }
  // Warps see each other's memory in order.
  for (char const* ignored : {"fence", "membar", "setmaxnreg", "prefetch"}) {
    if (name == ignored) return do_nothing;
  }
  if (name == "shfl") {
    instruction.mode = mode_among(instruction, {"up", "down", "bfly"});
    return shuffle;
  }
  if (name == "vote") {
    instruction.mode = mode_among(instruction, {"all", "any", "uni"});
    return vote;
  }
  if (name == "redux")
    return instruction.words.back() == "s32" ? reduce<int32_t> : reduce<uint32_t>;
  if (name == "elect") return elect;
  if (name == "bar" && instruction.has("warp")) return synchronise_warp;
  return nullptr;
}

}  // namespace cute_attention::emulator
