#include <cmath>
#include <type_traits>

#include "emulator/lanes.h"
#include "emulator/numbers.h"

namespace cute_attention::emulator {
namespace {

template <class T>
constexpr T quotient(T a, T b) {
  if (b == 0) return static_cast<T>(-1);  // what GPUs return; PTX leaves it open
  if (std::is_signed_v<T> && b == T(-1)) return static_cast<T>(0 - std::make_unsigned_t<T>(a));
  return static_cast<T>(a / b);
}
template <class T>
constexpr T remainder_of(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == T(-1)) return 0;
  return static_cast<T>(a % b);
}

// Integers wrap around: they are added and multiplied without a sign.
template <class T>
Execute of_integers(std::string const& name) {
  using U = std::make_unsigned_t<T>;
  if (name == "add") return EMULATE_2(T, T, T, T(U(a) + U(b)));
  if (name == "sub") return EMULATE_2(T, T, T, T(U(a) - U(b)));
  if (name == "mul") return EMULATE_2(T, T, T, T(uint64_t(a) * uint64_t(b)));
  if (name == "mad") return EMULATE_3(T, T, T, T, T(uint64_t(a) * uint64_t(b) + uint64_t(c)));
  if (name == "div") return EMULATE_2(T, T, T, quotient(a, b));
  if (name == "rem") return EMULATE_2(T, T, T, remainder_of(a, b));
  if (name == "min") return EMULATE_2(T, T, T, a < b ? a : b);
  if (name == "max") return EMULATE_2(T, T, T, a > b ? a : b);
  if (name == "neg") return EMULATE_1(T, T, T(U(0) - U(a)));
  if (name == "abs") return EMULATE_1(T, T, a < 0 ? T(U(0) - U(a)) : a);
  return nullptr;
}

// mul.wide and mad.wide: W has twice the bits of T.
template <class W, class T>
Execute of_wide_integers(std::string const& name) {
  using U = std::make_unsigned_t<W>;
  if (name == "mul") return EMULATE_2(W, T, T, W(U(W(a)) * U(W(b))));
  if (name == "mad") return EMULATE_3(W, T, T, W, W(U(W(a)) * U(W(b)) + U(c)));
  return nullptr;
}

// mul.hi and mad.hi, by a type W of twice the bits.
template <class W, class T>
Execute of_high_halves(std::string const& name) {
  constexpr int kBits = 8 * sizeof(T);
  if (name == "mul") return EMULATE_2(T, T, T, T((W(a) * W(b)) >> kBits));
  if (name == "mad")
    return EMULATE_3(T, T, T, T, T(uint64_t((W(a) * W(b)) >> kBits) + uint64_t(c)));
  return nullptr;
}

Execute of_floats(std::string const& name) {
  if (name == "add") return EMULATE_2(float, float, float, computed(a + b));
  if (name == "sub") return EMULATE_2(float, float, float, computed(a - b));
  if (name == "mul") return EMULATE_2(float, float, float, computed(a * b));
  if (name == "div") return EMULATE_2(float, float, float, computed(a / b));
  if (name == "min") return EMULATE_2(float, float, float, least(a, b));
  if (name == "max") return EMULATE_2(float, float, float, greatest(a, b));
  if (name == "fma") return EMULATE_3(float, float, float, float, computed(std::fma(a, b, c)));
  if (name == "abs") return EMULATE_1(float, float, std::fabs(a));
  if (name == "neg") return EMULATE_1(float, float, -a);
  if (name == "ex2") return EMULATE_1(float, float, computed(std::exp2(a)));
  if (name == "lg2") return EMULATE_1(float, float, computed(std::log2(a)));
  if (name == "rcp") return EMULATE_1(float, float, computed(1.f / a));
  if (name == "sqrt") return EMULATE_1(float, float, computed(std::sqrt(a)));
  if (name == "rsqrt") return EMULATE_1(float, float, computed(1.f / std::sqrt(a)));
  if (name == "tanh") return EMULATE_1(float, float, computed(std::tanh(a)));
  if (name == "sin") return EMULATE_1(float, float, computed(std::sin(a)));
  if (name == "cos") return EMULATE_1(float, float, computed(std::cos(a)));
  if (name == "copysign") return EMULATE_2(float, float, float, std::copysign(b, a));
  return nullptr;
}

Execute of_doubles(std::string const& name) {
  if (name == "add") return EMULATE_2(double, double, double, a + b);
  if (name == "sub") return EMULATE_2(double, double, double, a - b);
  if (name == "mul") return EMULATE_2(double, double, double, (a * b));
  if (name == "div") return EMULATE_2(double, double, double, a / b);
  if (name == "fma") return EMULATE_3(double, double, double, double, std::fma(a, b, c));
  return nullptr;
}

// One operation on a float of 16 bits. The product of two is exact in a double, so that fma rounds
// almost once: a double holds all of a sum but in cases that no test can tell.
template <class H>
struct Short {
  static H add(H a, H b) { return H::round(float(a) + float(b)); }
  static H sub(H a, H b) { return H::round(float(a) - float(b)); }
  static H mul(H a, H b) { return H::round(float(a) * float(b)); }
  static H min(H a, H b) { return H::round(least(a, b)); }
  static H max(H a, H b) { return H::round(greatest(a, b)); }
  static H fma(H a, H b, H c) {
    return H::round(static_cast<float>(double(float(a)) * float(b) + float(c)));
  }
  static H neg(H a) { return {static_cast<uint16_t>(a.bits ^ 0x8000)}; }
  static H abs(H a) { return {static_cast<uint16_t>(a.bits & 0x7fff)}; }
  static H ex2(H a) { return H::round(std::exp2(float(a))); }
  static H tanh(H a) { return H::round(std::tanh(float(a))); }
};

// Two in 32 bits.
template <class H>
struct Pair {
  H low, high;
};
template <class H, H (*f)(H)>
Pair<H> twice(Pair<H> a) {
  return {f(a.low), f(a.high)};
}
template <class H, H (*f)(H, H)>
Pair<H> twice(Pair<H> a, Pair<H> b) {
  return {f(a.low, b.low), f(a.high, b.high)};
}
template <class H, H (*f)(H, H, H)>
Pair<H> twice(Pair<H> a, Pair<H> b, Pair<H> c) {
  return {f(a.low, b.low, c.low), f(a.high, b.high, c.high)};
}

template <class H>
Execute of_shorts(std::string const& name) {
  using S = Short<H>;
  if (name == "add") return EMULATE_2(H, H, H, S::add(a, b));
  if (name == "sub") return EMULATE_2(H, H, H, S::sub(a, b));
  if (name == "mul") return EMULATE_2(H, H, H, S::mul(a, b));
  if (name == "min") return EMULATE_2(H, H, H, S::min(a, b));
  if (name == "max") return EMULATE_2(H, H, H, S::max(a, b));
  if (name == "fma") return EMULATE_3(H, H, H, H, S::fma(a, b, c));
  if (name == "neg") return EMULATE_1(H, H, S::neg(a));
  if (name == "abs") return EMULATE_1(H, H, S::abs(a));
  if (name == "ex2") return EMULATE_1(H, H, S::ex2(a));
  if (name == "tanh") return EMULATE_1(H, H, S::tanh(a));
  return nullptr;
}
template <class H>
Execute of_pairs(std::string const& name) {
  using S = Short<H>;
  using P = Pair<H>;
  if (name == "add") return EMULATE_2(P, P, P, (twice<H, S::add>(a, b)));
  if (name == "sub") return EMULATE_2(P, P, P, (twice<H, S::sub>(a, b)));
  if (name == "mul") return EMULATE_2(P, P, P, (twice<H, S::mul>(a, b)));
  if (name == "min") return EMULATE_2(P, P, P, (twice<H, S::min>(a, b)));
  if (name == "max") return EMULATE_2(P, P, P, (twice<H, S::max>(a, b)));
  if (name == "fma") return EMULATE_3(P, P, P, P, (twice<H, S::fma>(a, b, c)));
  if (name == "neg") return EMULATE_1(P, P, (twice<H, S::neg>(a)));
  if (name == "abs") return EMULATE_1(P, P, (twice<H, S::abs>(a)));
  if (name == "ex2") return EMULATE_1(P, P, (twice<H, S::ex2>(a)));
  if (name == "tanh") return EMULATE_1(P, P, (twice<H, S::tanh>(a)));
  return nullptr;
}

Execute of_wide_type(std::string const& name, std::string const& type) {
  if (type == "u16") return of_wide_integers<uint32_t, uint16_t>(name);
  if (type == "s16") return of_wide_integers<int32_t, int16_t>(name);
  if (type == "u32") return of_wide_integers<uint64_t, uint32_t>(name);
  if (type == "s32") return of_wide_integers<int64_t, int32_t>(name);
  return nullptr;
}
Execute of_high_type(std::string const& name, std::string const& type) {
  if (type == "u32") return of_high_halves<uint64_t, uint32_t>(name);
  if (type == "s32") return of_high_halves<int64_t, int32_t>(name);
  if (type == "u64") return of_high_halves<unsigned __int128, uint64_t>(name);
  if (type == "s64") return of_high_halves<__int128, int64_t>(name);
  return nullptr;
}

}  // namespace

Execute decode_arithmetic(Instruction& instruction) {
  std::string const& name = instruction.words[0];
  std::string const& type = instruction.words.back();
  if (instruction.has("sat") || instruction.has("cc") || instruction.has("relu")) return nullptr;
  if (instruction.has("wide")) return of_wide_type(name, type);
  if (instruction.has("hi")) return of_high_type(name, type);
  if (type == "u16") return of_integers<uint16_t>(name);
  if (type == "s16") return of_integers<int16_t>(name);
  if (type == "u32") return of_integers<uint32_t>(name);
  if (type == "s32") return of_integers<int32_t>(name);
  if (type == "u64") return of_integers<uint64_t>(name);
  if (type == "s64") return of_integers<int64_t>(name);
  if (type == "f32") return of_floats(name);
  if (type == "f64") return of_doubles(name);
  if (type == "f16") return of_shorts<Float16>(name);
  if (type == "bf16") return of_shorts<BFloat16>(name);
  if (type == "f16x2") return of_pairs<Float16>(name);
  if (type == "bf16x2") return of_pairs<BFloat16>(name);
  return nullptr;
}

}  // namespace cute_attention::emulator
