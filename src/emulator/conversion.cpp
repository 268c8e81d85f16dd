#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "emulator/memory.h"
#include "emulator/numbers.h"

namespace cute_attention::emulator {
namespace {

enum Type : uint32_t {
  kU8,
  kS8,
  kU16,
  kS16,
  kU32,
  kS32,
  kU64,
  kS64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kOther
};

Type type_of(std::string const& name) {
  static std::map<std::string, Type> const kTypes = {
      {"u8", kU8},   {"s8", kS8},   {"u16", kU16}, {"s16", kS16},   {"u32", kU32}, {"s32", kS32},
      {"u64", kU64}, {"s64", kS64}, {"f16", kF16}, {"bf16", kBF16}, {"f32", kF32}, {"f64", kF64}};
  auto const found = kTypes.find(name);
  return found == kTypes.end() ? kOther : found->second;
}
bool is_integer(Type type) { return type <= kS64; }
bool is_signed(Type type) { return type % 2 == 1; }
uint32_t bits_of_integer(Type type) { return 8u << (type / 2); }

// An integer of `type` in the low bits, as 64 bits.
uint64_t whole(uint64_t bits, Type type) {
  int const shift = 64 - static_cast<int>(bits_of_integer(type));
  return is_signed(type) ? static_cast<uint64_t>(static_cast<int64_t>(bits << shift) >> shift)
                         : bits << shift >> shift;
}

double number_of(uint64_t bits, Type type) {
  switch (type) {
    case kF16:
      return float(Float16{static_cast<uint16_t>(bits)});
    case kBF16:
      return float(BFloat16{static_cast<uint16_t>(bits)});
    case kF32:
      return float_of_bits(static_cast<uint32_t>(bits));
    case kF64:
      return from_slot<double>(bits);
    default: {
      uint64_t const integer = whole(bits, type);
      return is_signed(type) ? double(static_cast<int64_t>(integer)) : double(integer);
    }
  }
}

// Bits of Instruction::mode: the rounding, behind the two types.
enum Rounding : uint32_t { kNearest, kToZero, kDown, kUp };

double rounded(double value, Rounding rounding) {
  switch (rounding) {
    case kToZero:
      return std::trunc(value);
    case kDown:
      return std::floor(value);
    case kUp:
      return std::ceil(value);
    default:
      return std::nearbyint(value);
  }
}

// To the nearest integer that the type has; 0 of NaN.
uint64_t integer_of(double value, Type type, Rounding rounding) {
  if (std::isnan(value)) return 0;
  int const bits = static_cast<int>(bits_of_integer(type)) - is_signed(type);
  double const end = std::ldexp(1.0, bits), whole_value = rounded(value, rounding);
  if (whole_value >= end)
    return is_signed(type) ? (uint64_t(1) << bits) - 1 : ~uint64_t(0) >> (64 - bits);
  if (is_signed(type))
    return static_cast<uint64_t>(static_cast<int64_t>(std::max(whole_value, -end)));
  return static_cast<uint64_t>(std::max(whole_value, 0.0));
}

uint64_t bits_of_number(double value, Type type) {
  switch (type) {
    case kF16:
      return Float16::round(static_cast<float>(value)).bits;
    case kBF16:
      return BFloat16::round(static_cast<float>(value)).bits;
    case kF32:
      return bits_of_float(static_cast<float>(value));
    default:
      return to_slot(value);
  }
}

constexpr uint32_t kSaturates = 1 << 24;

void convert(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const to = static_cast<Type>(instruction.mode & 0xff);
  auto const from = static_cast<Type>(instruction.mode >> 8 & 0xff);
  auto const rounding = static_cast<Rounding>(instruction.mode >> 16 & 0xff);
  for_lanes(mask, [&](int lane) {
    uint64_t const bits = value_of(warp, instruction.operands[1], lane);
    uint64_t result = 0;
    if (is_integer(to) && is_integer(from)) {
      result = whole(whole(bits, from), to);
    } else if (is_integer(to)) {
      result = integer_of(number_of(bits, from), to, rounding);
    } else {
      double value = number_of(bits, from);
      bool const rounds_to_integer = !is_integer(from) && instruction.has("i");
      if (rounds_to_integer) value = rounded(value, rounding);
      if (instruction.mode & kSaturates) value = value > 0 ? std::min(value, 1.0) : 0;
      result = bits_of_number(value, to);
    }
    set_value(warp, instruction.operands[0], lane, result);
  });
}

Execute decode_cvt(Instruction& instruction) {
  auto& words = instruction.words;
  std::string const& to = words[words.size() - 2];
  std::string const& from = words.back();
  if (instruction.has("relu") || instruction.has("rz")) return nullptr;
  if (to == "bf16x2" && from == "f32") {
    return EMULATE_2(uint32_t, float, float,
                     uint32_t(BFloat16::round(a).bits) << 16 | BFloat16::round(b).bits);
  }
  if (to == "f16x2" && from == "f32") {
    return EMULATE_2(uint32_t, float, float,
                     uint32_t(Float16::round(a).bits) << 16 | Float16::round(b).bits);
  }
  Type const target = type_of(to), origin = type_of(from);
  if (target == kOther || origin == kOther) return nullptr;
  if (is_integer(target) && is_integer(origin) && instruction.has("sat")) return nullptr;
  static std::map<std::string, Rounding> const kToInteger = {
      {"rni", kNearest}, {"rzi", kToZero}, {"rmi", kDown}, {"rpi", kUp}};
  Rounding rounding = kNearest;
  bool to_integer = false;
  for (std::string const& word : words) {
    auto const found = kToInteger.find(word);
    if (found == kToInteger.end()) continue;
    rounding = found->second;
    to_integer = true;
  }
  if (to_integer) words.insert(words.begin() + 1, "i");
  instruction.mode = target | origin << 8 | rounding << 16;
  if (instruction.has("sat") && !is_integer(target)) instruction.mode |= kSaturates;
  return convert;
}

// mov between registers of which one has more bits, or several have as many as one.
void move_bits(Warp& warp, Instruction const& instruction, uint32_t mask) {
  Operand const &target = instruction.operands[0], &origin = instruction.operands[1];
  uint32_t const bits = instruction.size * 8;
  auto const low_bits = [](uint64_t value, uint32_t count) {
    return count == 64 ? value : value & ((uint64_t(1) << count) - 1);
  };
  for_lanes(mask, [&](int lane) {
    uint64_t value = 0;
    if (origin.kind == OperandKind::kVector) {
      uint32_t const each = bits / static_cast<uint32_t>(origin.parts.size());
      for (uint32_t i = 0; i < origin.parts.size(); ++i) {
        value |= low_bits(value_of(warp, origin.parts[i], lane), each) << (i * each);
      }
    } else {
      value = value_of(warp, origin, lane);
    }
    if (target.kind == OperandKind::kVector) {
      uint32_t const each = bits / static_cast<uint32_t>(target.parts.size());
      for (uint32_t i = 0; i < target.parts.size(); ++i) {
        set_value(warp, target.parts[i], lane, low_bits(value >> (i * each), each));
      }
    } else {
      set_value(warp, target, lane, value);
    }
  });
}

// cvta: between addresses of a space and generic ones.
void convert_address(Warp& warp, Instruction const& instruction, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    uint64_t const base = base_of(warp, instruction.space, lane);
    uint64_t const address = value_of(warp, instruction.operands[1], lane);
    set_value(warp, instruction.operands[0], lane,
              instruction.mode != 0 ? address - base : address + base);
  });
}

}  // namespace

Execute decode_conversion(Instruction& instruction) {
  std::string const& name = instruction.words[0];
  std::string const& type = instruction.words.back();
  if (name == "cvt") return decode_cvt(instruction);
  if (name == "cvta") {
    instruction.space = space_of(instruction);
    instruction.mode = instruction.has("to");
    return convert_address;
  }
  if (name != "mov" || type == "pred") return nullptr;
  instruction.size = bytes_of(type);
  auto const& operands = instruction.operands;
  bool const is_plain =
      operands[0].kind != OperandKind::kVector && operands[1].kind != OperandKind::kVector &&
      (operands[0].kind == operands[1].kind || operands[1].kind == OperandKind::kConstant);
  if (!is_plain) return move_bits;
  if (operands[0].kind == OperandKind::kRegister64) return EMULATE_1(uint64_t, uint64_t, a);
  return EMULATE_1(uint32_t, uint32_t, a);
}

}  // namespace cute_attention::emulator
