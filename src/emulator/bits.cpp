#include "emulator/lanes.h"

namespace cute_attention::emulator {
namespace {

uint32_t look_up(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t row = 0; row < 8; ++row) {
    if ((table >> row & 1) == 0) continue;
    result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
  return result;
}

uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t const bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t const select = selector >> (4 * i);
    uint32_t byte = bytes >> (8 * (select & 7)) & 0xff;
    if (select & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign
    result |= byte << (8 * i);
  }
  return result;
}

uint32_t reversed(uint32_t a) {
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) result |= (a >> i & 1) << (31 - i);
  return result;
}

uint64_t pair(uint32_t low, uint32_t high) { return uint64_t(high) << 32 | low; }
uint32_t at_most_32(uint32_t count) { return count < 32 ? count : 32; }

// `count` bits of a from bit `begin` on.
uint32_t extract(uint32_t a, uint32_t begin, uint32_t count) {
  begin &= 255;
  if (begin >= 32) return 0;
  return (a >> begin) & ((uint64_t(1) << at_most_32(count & 255)) - 1);
}
uint32_t insert(uint32_t a, uint32_t b, uint32_t begin, uint32_t count) {
  begin &= 255;
  if (begin >= 32) return b;
  uint32_t const mask = ((uint64_t(1) << at_most_32(count & 255)) - 1) << begin;
  return (b & ~mask) | (uint64_t(a) << begin & mask);
}

// d = f(a, b, c, e) of 32 bits.
template <uint32_t (*f)(uint32_t, uint32_t, uint32_t, uint32_t)>
void of_four(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  auto const a = source<uint32_t>(warp, operands[1]), b = source<uint32_t>(warp, operands[2]);
  auto const c = source<uint32_t>(warp, operands[3]), e = source<uint32_t>(warp, operands[4]);
  auto const d = destination<uint32_t>(warp, operands[0]);
  for_lanes(mask, [&](int lane) { d[lane] = f(a[lane], b[lane], c[lane], e[lane]); });
}

Execute funnel_shift(Instruction const& instruction) {
  using U = uint32_t;
  bool const wraps = instruction.has("wrap");
  if (instruction.has("l")) {
    if (wraps) return EMULATE_3(U, U, U, U, U(pair(a, b) << (c & 31) >> 32));
    return EMULATE_3(U, U, U, U, c >= 32 ? a : U(pair(a, b) << c >> 32));
  }
  if (wraps) return EMULATE_3(U, U, U, U, U(pair(a, b) >> (c & 31)));
  return EMULATE_3(U, U, U, U, U(pair(a, b) >> at_most_32(c)));
}

// A shift by as many bits as there are, or more, leaves none, or copies of the sign.
template <class T>
Execute of_type(std::string const& name) {
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t kBits = 8 * sizeof(T);
  if (name == "and") return EMULATE_2(T, T, T, T(a & b));
  if (name == "or") return EMULATE_2(T, T, T, T(a | b));
  if (name == "xor") return EMULATE_2(T, T, T, T(a ^ b));
  if (name == "not") return EMULATE_1(T, T, T(~a));
  if (name == "shl") return EMULATE_2(T, T, uint32_t, b < kBits ? T(U(a) << b) : T(0));
  if (name == "shr") return EMULATE_2(T, T, uint32_t, b < kBits ? T(a >> b) : T(a < 0 ? -1 : 0));
  return nullptr;
}

}  // namespace

Execute decode_bits(Instruction& instruction) {
  using U = uint32_t;
  std::string const& name = instruction.words[0];
  std::string const& type = instruction.words.back();
  if (name == "lop3" && instruction.operands.size() == 5) return of_four<look_up>;
  if (name == "bfi" && type == "b32") return of_four<insert>;
  if (name == "bfe" && type == "u32") return EMULATE_3(U, U, U, U, extract(a, b, c));
  if (name == "prmt" && instruction.words.size() == 2)
    return EMULATE_3(U, U, U, U, permute(a, b, c));
  if (name == "shf") return funnel_shift(instruction);
  if (name == "brev" && type == "b32") return EMULATE_1(U, U, reversed(a));
  if (name == "popc" && type == "b32") return EMULATE_1(U, U, U(__builtin_popcount(a)));
  if (name == "popc") return EMULATE_1(U, uint64_t, U(__builtin_popcountll(a)));
  if (name == "clz" && type == "b32") return EMULATE_1(U, U, a ? U(__builtin_clz(a)) : 32);
  if (name == "clz") return EMULATE_1(U, uint64_t, a ? U(__builtin_clzll(a)) : 64);
  if (name == "bfind" && type == "u32") {
    if (instruction.has("shiftamt")) return EMULATE_1(U, U, a ? U(__builtin_clz(a)) : ~0u);
    return EMULATE_1(U, U, a ? 31 - U(__builtin_clz(a)) : ~0u);
  }
  if (type == "b16" || type == "u16") return of_type<uint16_t>(name);
  if (type == "s16") return of_type<int16_t>(name);
  if (type == "b32" || type == "u32") return of_type<uint32_t>(name);
  if (type == "s32") return of_type<int32_t>(name);
  if (type == "b64" || type == "u64") return of_type<uint64_t>(name);
  if (type == "s64") return of_type<int64_t>(name);
  return nullptr;
}

}  // namespace cute_attention::emulator
