// emulator/numbers.h: floats of 16 bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace cute_attention::emulator {

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// Rounds the last `drop` bits away, to nearest, ties to even.
inline uint32_t rounded_shift(uint32_t bits, int drop) {
  uint32_t const kept = bits >> drop, rest = bits & ((1u << drop) - 1), half = 1u << (drop - 1);
  return kept + (rest > half || (rest == half && (kept & 1)));
}

struct BFloat16 {
  uint16_t bits;

  operator float() const { return float_of_bits(uint32_t(bits) << 16); }
  static BFloat16 round(float value) {
    if (std::isnan(value)) return {0x7fff};
    return {static_cast<uint16_t>(rounded_shift(bits_of_float(value), 16))};
  }
};

struct Float16 {
  uint16_t bits;

  operator float() const {
    uint32_t const sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31;
    uint32_t const fraction = bits & 0x3ff;
    if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return std::copysign(float(fraction) * 0x1p-24f, float_of_bits(sign | 1));
    return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  }
  static Float16 round(float value) {
    uint32_t const bits = bits_of_float(value), sign = bits >> 16 & 0x8000;
    uint32_t const magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {0x7fff};
    if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // 65520 and more
    if (magnitude < 0x38800000) {  // below 2^-14: a multiple of 2^-24
      float const steps = std::nearbyint(float_of_bits(magnitude) * 0x1p24f);
      return {static_cast<uint16_t>(sign | uint32_t(steps))};
    }
    return {static_cast<uint16_t>(sign | (rounded_shift(magnitude, 13) - (112u << 10)))};
  }
};

// What an operation on floats returns: a GPU's NaN always has these bits. That of x86 has a sign.
inline float computed(float value) { return std::isnan(value) ? float_of_bits(0x7fffffff) : value; }

// PTX's min and max: of a NaN and a number, the number.
inline float least(float a, float b) { return std::isnan(a) || b < a ? b : a; }
inline float greatest(float a, float b) { return std::isnan(a) || b > a ? b : a; }

}  // namespace cute_attention::emulator
