// emulator/lanes.h: the values of operands, lane by lane, and functions that apply an operation to
// the lanes of a warp.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator/machine.h"

namespace cute_attention::emulator {

// A register holds each lane's value in a slot: values of 16 bits have one of 32.
template <class T>
using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
T from_slot(Slot<T> slot) {
  T value;
  std::memcpy(&value, &slot, sizeof(T));
  return value;
}
template <class T>
Slot<T> to_slot(T value) {
  Slot<T> slot = 0;
  std::memcpy(&slot, &value, sizeof(T));
  return slot;
}

template <class T>
Slot<T> const* source(Warp const& warp, Operand const& operand) {
  void const* const constant = sizeof(T) == 8 ? operand.lanes64 : operand.lanes32;
  bool const is_constant = operand.kind == OperandKind::kConstant;
  return static_cast<Slot<T> const*>(is_constant ? constant : warp.registers + operand.place);
}
template <class T>
Slot<T>* destination(Warp& warp, Operand const& operand) {
  return reinterpret_cast<Slot<T>*>(warp.registers + operand.place);
}

// An operand's value in one lane, of whatever kind it is.
inline uint64_t value_of(Warp const& warp, Operand const& operand, int lane) {
  switch (operand.kind) {
    case OperandKind::kConstant:
      return operand.value;
    case OperandKind::kRegister32:
      return source<uint32_t>(warp, operand)[lane];
    case OperandKind::kRegister64:
      return source<uint64_t>(warp, operand)[lane];
    case OperandKind::kPredicate:
      return (warp.predicates[operand.place] >> lane & 1) ^ uint64_t(operand.negated);
    default:
      fail("%s: an operand without a value", where(warp).c_str());
  }
}
inline void set_value(Warp& warp, Operand const& operand, int lane, uint64_t value) {
  switch (operand.kind) {
    case OperandKind::kRegister32:
      destination<uint32_t>(warp, operand)[lane] =
          static_cast<uint32_t>(operand.has_16_bits ? value & 0xffff : value);
      break;
    case OperandKind::kRegister64:
      destination<uint64_t>(warp, operand)[lane] = value;
      break;
    case OperandKind::kPredicate:
      warp.predicates[operand.place] &= ~(1u << lane);
      warp.predicates[operand.place] |= static_cast<uint32_t>(value & 1) << lane;
      break;
    case OperandKind::kSink:
      break;
    default:
      fail("%s: an operand that cannot be written", where(warp).c_str());
  }
}

// A predicate's bits, one for each lane.
inline uint32_t bits_of(Warp const& warp, Operand const& predicate) {
  if (predicate.kind == OperandKind::kConstant) return predicate.value ? kAllLanes : 0;
  uint32_t const bits = warp.predicates[predicate.place];
  return predicate.negated ? ~bits : bits;
}
inline void set_bits(Warp& warp, Operand const& predicate, uint32_t mask, uint32_t bits) {
  if (predicate.kind == OperandKind::kSink) return;
  uint32_t& target = warp.predicates[predicate.place];
  target = (target & ~mask) | (bits & mask);
}

inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }

// Calls f(lane) for the lanes in the mask. Compilers make vector code of it where all are.
template <class F>
void for_lanes(uint32_t mask, F f) {
  if (mask == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) f(lane);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (mask >> lane & 1) f(lane);
    }
  }
}

template <class D, class A, class F>
void apply(Warp& warp, Instruction const& instruction, uint32_t mask, F f) {
  auto const a = source<A>(warp, instruction.operands[1]);
  auto const d = destination<D>(warp, instruction.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = to_slot<D>(f(from_slot<A>(a[lane]))); });
}
template <class D, class A, class B, class F>
void apply(Warp& warp, Instruction const& instruction, uint32_t mask, F f) {
  auto const a = source<A>(warp, instruction.operands[1]);
  auto const b = source<B>(warp, instruction.operands[2]);
  auto const d = destination<D>(warp, instruction.operands[0]);
  for_lanes(mask, [&](int lane) {
    d[lane] = to_slot<D>(f(from_slot<A>(a[lane]), from_slot<B>(b[lane])));
  });
}
template <class D, class A, class B, class C, class F>
void apply(Warp& warp, Instruction const& instruction, uint32_t mask, F f) {
  auto const a = source<A>(warp, instruction.operands[1]);
  auto const b = source<B>(warp, instruction.operands[2]);
  auto const c = source<C>(warp, instruction.operands[3]);
  auto const d = destination<D>(warp, instruction.operands[0]);
  for_lanes(mask, [&](int lane) {
    d[lane] = to_slot<D>(f(from_slot<A>(a[lane]), from_slot<B>(b[lane]), from_slot<C>(c[lane])));
  });
}

// Functions that set d = EXPR(a), EXPR(a, b) or EXPR(a, b, c) in each lane: an Execute.
#define EMULATE_1(D, A, EXPR)                                            \
  [](Warp& warp, Instruction const& instruction, uint32_t mask) {        \
    apply<D, A>(warp, instruction, mask, [](A a) -> D { return EXPR; }); \
  }
#define EMULATE_2(D, A, B, EXPR)                                                 \
  [](Warp& warp, Instruction const& instruction, uint32_t mask) {                \
    apply<D, A, B>(warp, instruction, mask, [](A a, B b) -> D { return EXPR; }); \
  }
#define EMULATE_3(D, A, B, C, EXPR)                                                      \
  [](Warp& warp, Instruction const& instruction, uint32_t mask) {                        \
    apply<D, A, B, C>(warp, instruction, mask, [](A a, B b, C c) -> D { return EXPR; }); \
  }

// Whether all lanes of `needed` that are alive execute this together. If not, those of `mask` wait
// for the others, and the instruction is executed again.
inline bool are_together(Warp& warp, uint32_t mask, uint32_t needed) {
  needed &= warp.alive;
  if ((mask & needed) == needed) return true;
  for_lanes(mask, [&](int lane) { warp.wait[lane] = Wait::kLanes; });
  warp.has_moved = true;
  return false;
}
inline bool are_together(Warp& warp, uint32_t mask) { return are_together(warp, mask, kAllLanes); }

// Each decodes the instructions of one file: it returns null for all others.
Execute decode_arithmetic(Instruction& instruction);
Execute decode_bits(Instruction& instruction);
Execute decode_comparison(Instruction& instruction);
Execute decode_conversion(Instruction& instruction);
Execute decode_memory(Instruction& instruction);
Execute decode_control(Instruction& instruction);
Execute decode_barrier(Instruction& instruction);
Execute decode_matrix(Instruction& instruction);
Execute decode_wgmma(Instruction& instruction);
Execute decode_bulk_copy(Instruction& instruction);
Execute decode_async_copy(Instruction& instruction);

}  // namespace cute_attention::emulator
