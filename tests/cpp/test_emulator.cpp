// test_emulator.cpp: runs small kernels, written in PTX here, in the emulator: arithmetic, bits,
// lanes that part and meet, shuffles, and what it refuses.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "emulated_kernel.h"
#include "emulator/numbers.h"

namespace {

using namespace cute_attention::emulator;
using namespace cute_attention::testing;

void check_lanes(std::string const& body, std::function<uint32_t(uint32_t)> const& expected,
                 std::string const& what) {
  std::vector<uint32_t> const got = result_of(body);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    check_equal(got[lane], expected(lane), what + ", lane " + std::to_string(lane));
  }
}

void test_arithmetic() {
  check_lanes("mad.lo.s32 %r9, %r1, -3, 5;", [](uint32_t i) { return 5 - 3 * i; }, "mad.lo");
  check_lanes(
      "mov.u32 %r3, 0x80000001; mul.hi.u32 %r9, %r3, %r1;",
      [](uint32_t i) { return uint32_t(0x80000001ull * i >> 32); }, "mul.hi");
  check_lanes(
      "sub.s32 %r3, %r1, 16; shr.s32 %r9, %r3, 2;",
      [](uint32_t i) { return uint32_t((int32_t(i) - 16) >> 2); }, "shr of a sign");
  check_lanes(
      "sub.s32 %r3, %r1, 9; div.s32 %r4, %r3, 4; rem.s32 %r5, %r3, 4; mad.lo.s32 %r9, %r4, 100, "
      "%r5;",
      [](uint32_t i) {
        int const a = int(i) - 9;
        return uint32_t(a / 4 * 100 + a % 4);
      },
      "div and rem");
  check_lanes(
      "prmt.b32 %r9, %r1, 0x80, 0xc010;", [](uint32_t i) { return 0xff000000u | i << 0 | i << 16; },
      "prmt with a sign");
  check_lanes(
      "cvt.rn.f32.u32 %f1, %r1; mul.f32 %f1, %f1, 0f3F000000; cvt.rni.s32.f32 %r9, %f1;",
      [](uint32_t i) { return uint32_t(std::nearbyint(i * 0.5)); }, "ties to even");
  check_lanes(
      "cvt.rn.f32.u32 %f1, %r1; add.f32 %f1, %f1, 0f3B800000; cvt.rn.bf16x2.f32 %r9, %f1, %f1;",
      [](uint32_t i) {
        uint32_t const bits = BFloat16::round(float(i) + 0x1p-8f).bits;
        return bits << 16 | bits;
      },
      "cvt.bf16x2");
}

// A NaN that is computed has no sign, whatever its operands had.
void test_nan_has_no_sign() {
  for (std::string const operation :
       {"add.f32 %f3, %f1, %f2;", "mul.f32 %f3, %f1, %f1;", "fma.rn.f32 %f3, %f1, %f2, %f2;",
        "sub.f32 %f2, %f2, %f2; mov.b32 %f1, 0x7f800000; mul.f32 %f3, %f1, %f2;"}) {
    check_lanes(
        "mov.b32 %f1, 0xffc00001; mov.b32 %f2, 0x3f800000; " + operation + " mov.b32 %r9, %f3;",
        [](uint32_t) { return 0x7fffffffu; }, operation);
  }
}

void test_bits() {
  check_lanes(
      "mov.u32 %r3, -1; bfi.b32 %r9, %r1, %r3, 4, 3;",
      [](uint32_t i) { return (~0u & ~0x70u) | (i & 7) << 4; }, "bfi.b32");
  check_lanes(
      "cvt.u64.u32 %rd5, %r1; mov.b64 %rd6, 0; bfi.b64 %rd6, %rd5, %rd6, 32, 32; shr.u64 %rd6, "
      "%rd6, 31; cvt.u32.u64 %r9, %rd6;",
      [](uint32_t i) { return 2 * i; }, "bfi.b64");
  check_lanes("bfe.u32 %r9, %r1, 1, 3;", [](uint32_t i) { return i >> 1 & 7; }, "bfe");
  check_lanes(
      "mov.u32 %r3, 0xf0f0f0f0; lop3.b32 %r9, %r1, %r3, 0xff, 0x6a;",
      [](uint32_t i) { return (i & 0xf0f0f0f0) ^ 0xff; }, "lop3");
}

// Row r, column c of 8 x 8 is 8 * r + c: a lane has 2 * lane and 2 * lane + 1.
void test_movmatrix_transposes() {
  check_lanes(
      "shl.b32 %r3, %r1, 1; mad.lo.s32 %r4, %r3, 0x10001, 0x10000; "
      "movmatrix.sync.aligned.m8n8.trans.b16 %r9, %r4;",
      [](uint32_t lane) {
        uint32_t const row = lane / 4, column = lane % 4 * 2;
        return (8 * column + row) | (8 * (column + 1) + row) << 16;
      },
      "movmatrix");
}

void test_floats_of_16_bits() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    Float16 const half{static_cast<uint16_t>(bits)};
    BFloat16 const brain{static_cast<uint16_t>(bits)};
    if (!std::isnan(float(half))) check_equal(Float16::round(half).bits, bits, "fp16 and back");
    if (!std::isnan(float(brain))) check_equal(BFloat16::round(brain).bits, bits, "bf16 and back");
  }
  check_equal(uint32_t(Float16::round(65519.f).bits), 0x7bffu, "the largest fp16");
  check_equal(uint32_t(Float16::round(65520.f).bits), 0x7c00u, "infinity in fp16");
  check_equal(uint32_t(Float16::round(0x1p-24f).bits), 1u, "the smallest fp16");
  check_equal(uint32_t(Float16::round(0x1.8p-14f).bits), 0x600u, "a small normal fp16");
}

void test_lanes_that_part() {
  // Odd lanes loop as often as their number says, then all meet in a shuffle.
  check_lanes(
      R"(
    mov.u32 %r9, 0; mov.u32 %r3, %r1; and.b32 %r4, %r1, 1;
    setp.eq.s32 %p1, %r4, 0;
    @%p1 bra $L_meet;
  $L_loop:
    add.s32 %r9, %r9, 2; sub.s32 %r3, %r3, 1;
    setp.gt.s32 %p2, %r3, 0;
    @%p2 bra $L_loop;
  $L_meet:
    shfl.sync.bfly.b32 %r9|%p3, %r9, 1, 31, -1;)",
      [](uint32_t i) { return i % 2 == 0 ? 2 * (i + 1) : 0; }, "lanes that part and meet");
  check_lanes(
      "setp.lt.u32 %p1, %r1, 5; vote.sync.ballot.b32 %r9, %p1, -1;", [](uint32_t) { return 31u; },
      "a ballot");
  check_lanes(
      "shfl.sync.up.b32 %r9, %r1, 3, 0, -1;", [](uint32_t i) { return i < 3 ? i : i - 3; },
      "shfl.up");
  check_lanes(
      "setp.lt.u32 %p1, %r1, 7; @%p1 bra $L_a; add.s32 %r9, %r1, 1000; bra $L_b; $L_a: mov.u32 "
      "%r9, 7; $L_b: bar.warp.sync -1;",
      [](uint32_t i) { return i < 7 ? 7 : i + 1000; }, "two branches");
}

void test_what_is_refused() {
  check(stops([] { result_of("ld.shared.u32 %r9, [memory+16384];"); }, "outside"),
        "shared memory that a launch did not ask for");
  check(stops([] { result_of("ld.global.u32 %r9, [%rd3+2];"); }, "not a multiple"),
        "an address that is not aligned");
  check(stops([] { result_of("tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd3, {%r1}];"); }, "tex"),
        "an instruction that is not known");
}

}  // namespace

int main() {
  test_arithmetic();
  test_nan_has_no_sign();
  test_bits();
  test_movmatrix_transposes();
  test_floats_of_16_bits();
  test_lanes_that_part();
  test_what_is_refused();
  return report();
}
