#include <cmath>
#include <map>

#include "emulator/lanes.h"
#include "emulator/numbers.h"

namespace cute_attention::emulator {
namespace {

// Bits of Instruction::mode: for which relations of a and b a comparison is true.
constexpr uint32_t kLess = 1, kEqual = 2, kGreater = 4, kUnordered = 8;
// How its result is combined with a predicate.
constexpr uint32_t kAnd = 16, kOr = 32, kXor = 64;

uint32_t relations(std::string const& name) {
  static std::map<std::string, uint32_t> const kRelations = {
      {"eq", kEqual},
      {"ne", kLess | kGreater},
      {"lt", kLess},
      {"le", kLess | kEqual},
      {"gt", kGreater},
      {"ge", kGreater | kEqual},
      {"lo", kLess},
      {"ls", kLess | kEqual},
      {"hi", kGreater},
      {"hs", kGreater | kEqual},
      {"equ", kEqual | kUnordered},
      {"neu", kLess | kGreater | kUnordered},
      {"ltu", kLess | kUnordered},
      {"leu", kLess | kEqual | kUnordered},
      {"gtu", kGreater | kUnordered},
      {"geu", kGreater | kEqual | kUnordered},
      {"num", kLess | kEqual | kGreater},
      {"nan", kUnordered},
  };
  auto const found = kRelations.find(name);
  return found == kRelations.end() ? 0 : found->second;
}

template <class T, class Compared>
void compare(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const a = source<T>(warp, instruction.operands[1]);
  auto const b = source<T>(warp, instruction.operands[2]);
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    Compared const x = from_slot<T>(a[lane]), y = from_slot<T>(b[lane]);
    uint32_t const relation = x < y ? kLess : x == y ? kEqual : x > y ? kGreater : kUnordered;
    bits |= uint32_t((instruction.mode & relation) != 0) << lane;
  }
  uint32_t opposite = ~bits;
  if (instruction.mode & (kAnd | kOr | kXor)) {
    uint32_t const other = bits_of(warp, instruction.operands[3]);
    for (uint32_t* result : {&bits, &opposite}) {
      if (instruction.mode & kAnd) *result &= other;
      if (instruction.mode & kOr) *result |= other;
      if (instruction.mode & kXor) *result ^= other;
    }
  }
  Operand const& target = instruction.operands[0];
  if (target.kind == OperandKind::kVector) {
    set_bits(warp, target.parts[0], mask, bits);
    set_bits(warp, target.parts[1], mask, opposite);
  } else {
    set_bits(warp, target, mask, bits);
  }
}

Execute decode_setp(Instruction& instruction) {
  std::string const& type = instruction.words.back();
  instruction.mode = relations(instruction.words[1]);
  if (instruction.mode == 0) return nullptr;
  if (instruction.has("and")) instruction.mode |= kAnd;
  if (instruction.has("or")) instruction.mode |= kOr;
  if (instruction.has("xor")) instruction.mode |= kXor;
  if (type == "u16" || type == "b16") return compare<uint16_t, uint16_t>;
  if (type == "s16") return compare<int16_t, int16_t>;
  if (type == "u32" || type == "b32") return compare<uint32_t, uint32_t>;
  if (type == "s32") return compare<int32_t, int32_t>;
  if (type == "u64" || type == "b64") return compare<uint64_t, uint64_t>;
  if (type == "s64") return compare<int64_t, int64_t>;
  if (type == "f32") return compare<float, float>;
  if (type == "f64") return compare<double, double>;
  if (type == "f16") return compare<Float16, float>;
  if (type == "bf16") return compare<BFloat16, float>;
  return nullptr;
}

template <class T>
void select(Warp& warp, Instruction const& instruction, uint32_t mask) {
  uint32_t const chosen = bits_of(warp, instruction.operands[3]);
  auto const a = source<T>(warp, instruction.operands[1]);
  auto const b = source<T>(warp, instruction.operands[2]);
  auto const d = destination<T>(warp, instruction.operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = chosen >> lane & 1 ? a[lane] : b[lane]; });
}

template <class F>
void combine(Warp& warp, Instruction const& instruction, uint32_t mask, F f) {
  auto const& operands = instruction.operands;
  uint32_t const b = operands.size() > 2 ? bits_of(warp, operands[2]) : 0;
  set_bits(warp, operands[0], mask, f(bits_of(warp, operands[1]), b));
}
#define EMULATE_PREDICATES(EXPR)                                                       \
  [](Warp& warp, Instruction const& instruction, uint32_t mask) {                      \
    combine(warp, instruction, mask,                                                   \
            [](uint32_t a, [[maybe_unused]] uint32_t b) -> uint32_t { return EXPR; }); \
  }

}  // namespace

Execute decode_comparison(Instruction& instruction) {
  std::string const& name = instruction.words[0];
  std::string const& type = instruction.words.back();
  if (name == "setp") return decode_setp(instruction);
  if (name == "selp") return bytes_of(type) == 8 ? select<uint64_t> : select<uint32_t>;
  if (type != "pred") return nullptr;
  if (name == "and") return EMULATE_PREDICATES(a & b);
  if (name == "or") return EMULATE_PREDICATES(a | b);
  if (name == "xor") return EMULATE_PREDICATES(a ^ b);
  if (name == "not") return EMULATE_PREDICATES(~a);
  if (name == "mov") return EMULATE_PREDICATES(a);
  return nullptr;
}

}  // namespace cute_attention::emulator
