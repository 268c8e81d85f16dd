// test_emulator.cpp: runs small kernels, written in PTX here, in the emulator (docs/emulator.md):
// arithmetic, lanes that part and meet, shuffles, and that missing waits and fences of asynchronous
// work show.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "emulator/machine.h"
#include "emulator/numbers.h"
#include "emulator/tensor_map.h"

namespace {

using namespace cute_attention::emulator;
using namespace cute_attention::testing;

constexpr uint32_t kSharedBytes = 16384;

// A kernel of this body. %rd1 is the address of `data`, %rd2 of a tensor map of it, %r1 the thread;
// %sm the shared memory.
std::string program(std::string const& body) {
  return R"(.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 kernel_param_0, .param .align 64 .b8 kernel_param_1[128])
.maxntid 64, 1, 1
{
  .reg .pred %p<9>;
  .reg .b16 %h<9>;
  .reg .b32 %r<99>;
  .reg .f32 %f<99>;
  .reg .b64 %rd<19>;
  ld.param.u64 %rd1, [kernel_param_0];
  mov.b64 %rd2, kernel_param_1;
  cvta.param.u64 %rd2, %rd2;
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, memory;  // comments; { and } in them mean nothing
)" + body +
         "\n  ret;\n}\n";
}

// %rd3 is the address of data[thread], of 4 bytes each.
std::string const kOwnPlace = "mul.wide.u32 %rd3, %r1, 4; add.s64 %rd3, %rd1, %rd3;\n";

// Runs a kernel over `data`, a tensor [8, 64] of 16-bit floats to TMA.
void run_kernel(std::string const& body, std::vector<uint32_t>& data, int threads = 32,
                Timing timing = Timing::kPrompt, uint64_t seed = 0) {
  Module module;
  parse(program(body), module);
  Grid grid;
  grid.kernel = module.kernels.at("kernel").get();
  std::memset(grid.size, 0, sizeof(grid.size));
  grid.size[0] = grid.size[1] = grid.size[2] = 1;
  grid.block[0] = threads;
  grid.block[1] = grid.block[2] = 1;
  grid.dynamic_shared_bytes = kSharedBytes;
  grid.multiprocessors = 1;
  grid.timing = timing;
  grid.random.seed(seed);
  alignas(128) uint8_t parameters[256] = {};
  uint64_t const address = reinterpret_cast<uint64_t>(data.data());
  std::memcpy(parameters, &address, 8);
  if (address % 16 == 0 && data.size() >= 256) {
    uint64_t const sizes[] = {64, 8}, strides[] = {128};
    uint32_t const box[] = {64, 8}, steps[] = {1, 1};
    constexpr int kBFloat16 = 9, kSwizzle128 = 3;
    encode_tensor_map(parameters + 64, kBFloat16, 2, data.data(), sizes, strides, box, steps, 0,
                      kSwizzle128, 0, 0);
  }
  grid.parameters = parameters;
  run(grid, 1);
}

std::vector<uint32_t> result_of(std::string const& body, int threads = 32,
                                Timing timing = Timing::kPrompt) {
  std::vector<uint32_t> data(256, 0);
  run_kernel(kOwnPlace + body + "\nst.global.u32 [%rd3], %r9;", data, threads, timing);
  return data;
}

void check_lanes(std::string const& body, std::function<uint32_t(uint32_t)> const& expected,
                 std::string const& what) {
  std::vector<uint32_t> const got = result_of(body);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    check_equal(got[lane], expected(lane), what + ", lane " + std::to_string(lane));
  }
}

// Whether a process that does this ends with the emulator's message about `reason`.
bool stops(std::function<void()> const& action, std::string const& reason) {
  int ends[2];
  if (pipe(ends) != 0) return false;
  pid_t const child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    action();
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && text.find(reason) != std::string::npos;
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

// Threads of two warps write shared memory and read what the other warp wrote.
void test_barrier() {
  std::string const write =
      "shl.b32 %r3, %r1, 2; add.s32 %r3, %r3, %r2; st.shared.u32 [%r3], %r1;\n";
  std::string const read = "xor.b32 %r4, %r3, 128; ld.shared.u32 %r9, [%r4];";
  for (Timing const timing : {Timing::kPrompt, Timing::kLate, Timing::kRandom}) {
    std::vector<uint32_t> const got = result_of(write + "bar.sync 0;\n" + read, 64, timing);
    for (uint32_t i = 0; i < 64; ++i) check_equal(got[i], i ^ 32, "behind a barrier");
  }
  std::vector<uint32_t> const got = result_of(write + read, 64);
  check(got[0] != 32, "without a barrier the first warp reads nothing");
  check(stops([&] { result_of("setp.lt.u32 %p1, %r1, 32; @%p1 bra $L; bar.sync 0; $L:", 64); },
              "deadlock"),
        "a barrier that half of the warps do not reach is a deadlock");
  std::string const counts =
      "setp.lt.u32 %p1, %r1, 32; selp.u32 %r3, 64, 96, %p1; bar.sync 1, %r3;";
  check(stops([&] { result_of(counts, 64); }, "others say"), "warps that disagree about a barrier");
}

// Loads the tensor by TMA; lane 0 waits, if asked; every thread reads one number.
std::string tma_load(bool waits) {
  return std::string(R"(
    add.s32 %r3, %r2, 8192;
    setp.ne.s32 %p1, %r1, 0;
    @%p1 bra $L_loaded;
    mbarrier.init.shared::cta.b64 [%r3], 1;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 1024;
    mov.u32 %r4, 0;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2, {%r4, %r4}], [%r3];
  $L_loaded:
    bar.warp.sync -1;)") +
         (waits ? R"(
  $L_wait:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
    @%p2 bra $L_ready;
    bra $L_wait;
  $L_ready:)"
                : "") +
         "\n shl.b32 %r5, %r1, 2; add.s32 %r5, %r5, %r2; add.s32 %r5, %r5, 256; ld.shared.u32 %r9, "
         "[%r5];\n";
}

void test_tma() {
  auto const loaded = [](bool waits, Timing timing) {
    std::vector<uint32_t> data(256);
    for (uint32_t i = 0; i < 256; ++i) data[i] = 7 * i;
    run_kernel(kOwnPlace + tma_load(waits) + "st.global.u32 [%rd3], %r9;", data, 32, timing);
    return data;
  };
  for (Timing const timing : {Timing::kPrompt, Timing::kLate}) {
    std::vector<uint32_t> const got = loaded(true, timing);
    for (uint32_t i = 0; i < 32; ++i) {
      uint32_t const unit = i / 4 ^ 2;  // of row 2 the 128-byte swizzle exchanges units
      check_equal(got[i], 7 * (64 + unit * 4 + i % 4), "a box of a tensor");
    }
  }
  check_equal(loaded(false, Timing::kPrompt)[0], 7 * (64 + 8u), "TMA that is prompt");
  check(stops([&] { loaded(false, Timing::kLate); }, "TMA loads"), "TMA that nobody waits for");
}

// One warp stores 16 bytes by TMA to the tensor's first ones.
void test_proxy_fence() {
  char const* const shared = "st.shared.u32 [%r3], 5;\n";
  char const* const generic =
      "cvt.u64.u32 %rd4, %r3; cvta.shared.u64 %rd4, %rd4; st.u32 [%rd4], 5;\n";
  auto const first = [](char const* store, char const* fence, Timing timing) {
    std::vector<uint32_t> data(256, 0);
    run_kernel(std::string("shl.b32 %r3, %r1, 2; add.s32 %r3, %r3, %r2;\n") + store + fence + R"(
      bar.warp.sync -1; setp.ne.s32 %p1, %r1, 0; @%p1 bra $L_done;
      cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 16;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    $L_done:)",
               data, 32, timing);
    return data[3];
  };
  for (char const* store : {shared, generic}) {
    check_equal(first(store, "fence.proxy.async.shared::cta;", Timing::kLate), 5u,
                "a store behind a fence");
    check_equal(first(store, "", Timing::kPrompt), 5u, "a store without one, unnoticed");
    check_equal(first(store, "", Timing::kLate), ~0u, "a store without a fence");
  }
}

// A warp reads a buffer, tells that it may be refilled, and uses what it read; another refills it.
void test_reads_that_are_not_ended() {
  auto const wrong = [](char const* end_reads) {
    int count = 0;
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      std::vector<uint32_t> data(256, 3);
      std::string const body = kOwnPlace + std::string(R"(
        st.shared.u32 [%r2], 1;
        add.s32 %r3, %r2, 8192; add.s32 %r4, %r3, 8;
        setp.eq.s32 %p1, %r1, 0;
        @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
        @%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
        bar.sync 0;
        setp.ge.u32 %p2, %r1, 32;
        @%p2 bra $L_refill;
        ld.shared.u32 %r9, [%r2];)") +
                               end_reads + R"(
        bar.warp.sync -1;
        @%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
        mov.u32 %r5, 0;
        add.s32 %r5, %r5, 1;
        st.global.u32 [%rd3], %r9;
        bra $L_end;
      $L_refill:
        setp.ne.s32 %p3, %r1, 32;
        @%p3 bra $L_end;
      $L_wait:
        mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r3], 0;
        @%p4 bra $L_free;
        bra $L_wait;
      $L_free:
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 16, [%r4];
      $L_filled:
        mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r4], 0;
        @%p5 bra $L_end;
        bra $L_filled;
      $L_end:)";
      run_kernel(body, data, 64, Timing::kRandom, seed);
      count += data[0] != 1;
    }
    return count;
  };
  check_equal(wrong("fence.proxy.async.shared::cta;"), 0, "reads that are ended");
  check(wrong("") > 0, "reads that are not ended read the next data");
}

// D = A B of ones by WGMMA; the accumulators are used before or behind the wait.
void test_wgmma() {
  auto const sum = [](bool waits, Timing timing) {
    std::string registers;
    for (int i = 0; i < 4; ++i) registers += (i ? ", %f" : "%f") + std::to_string(i);
    std::string const body = kOwnPlace + R"(
      shl.b32 %r3, %r1, 4; add.s32 %r3, %r3, %r2;
      mov.u32 %r4, 0x3f803f80;
      st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4};
      fence.proxy.async.shared::cta;
      bar.sync 0;
      shr.u32 %r5, %r2, 4; cvt.u64.u32 %rd5, %r5;
      or.b64 %rd5, %rd5, 0x4000000000;
      mov.u32 %r6, 0;
      setp.ne.s32 %p1, %r6, 0;
      wgmma.fence.sync.aligned;
      wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {)" +
                             registers + R"(}, {%r4, %r4, %r4, %r4}, %rd5, %p1, 1, 1, 0;
      wgmma.commit_group.sync.aligned;
      )" + (waits ? "wgmma.wait_group.sync.aligned 0;" : "") +
                             R"(
      st.global.f32 [%rd3], %f1;
      wgmma.wait_group.sync.aligned 0;)";
    std::vector<uint32_t> data(256, 0);
    run_kernel(body, data, 128, timing);
    return float_of_bits(data[77]);
  };
  check_equal(sum(true, Timing::kPrompt), 16.f, "WGMMA");
  check_equal(sum(true, Timing::kLate), 16.f, "WGMMA that is late");
  check(!(sum(false, Timing::kLate) == 16.f), "accumulators that nobody waited for");
}

// What the kernel before has stored or added is seen behind griddepcontrol.wait by who waits there,
// and by host code afterwards.
void test_kernel_that_begins_early() {
  std::string const wait = "griddepcontrol.wait;", first_warp = "setp.lt.u32 %p1, %r1, 32;";
  struct {
    char const* what;
    std::string before, after;  // what stands before the load, and behind it
    bool sees;
  } const cases[] = {
      {"a kernel that waits for the one before", wait, "", true},
      {"a kernel that waits too late", "", wait, false},
      {"a warp that does not wait, where another does", first_warp + "@%p1 " + wait, "", false},
  };
  for (auto const& each : cases) {
    std::vector<uint32_t> data(256, 0);
    LateStores stores;
    auto const launch = [&](std::string const& body, bool early) {
      Module module;
      parse(program(kOwnPlace + body), module);
      alignas(128) uint8_t parameters[256] = {};
      uint64_t const address = reinterpret_cast<uint64_t>(data.data());
      std::memcpy(parameters, &address, 8);
      Grid grid;
      grid.kernel = module.kernels.at("kernel").get();
      std::fill_n(grid.size, 3, 1);
      std::fill_n(grid.block, 3, 1);
      grid.block[0] = 64;
      grid.parameters = parameters;
      grid.timing = Timing::kLate;
      grid.multiprocessors = 1;
      grid.begins_early = early;
      run_behind(grid, 1, stores);
    };
    std::string const early = "griddepcontrol.launch_dependents;";
    launch(early + "mov.u32 %r9, 3; st.global.u32 [%rd3], %r9; red.global.add.u32 [%rd3], 4;",
           false);
    std::string const load = "ld.global.u32 %r9, [%rd3]; st.global.u32 [%rd3+256], %r9;";
    launch(early + each.before + load + each.after, true);
    launch("ld.global.u32 %r9, [%rd3+256]; st.global.u32 [%rd3+512], %r9;" + wait, true);
    for (uint32_t i = 32; i < 64; ++i) {
      check_equal(data[i], 7u, "what host code sees");
      check_equal(data[i + 64], each.sees ? 7u : 0u, each.what);
      check_equal(data[i + 128], 0u, "behind a kernel that has itself begun early");
    }
    auto const forget = [&] {
      launch(early + "mov.u32 %r9, 3; st.global.u32 [%rd3], %r9;", false);
      launch(load, true);
    };
    check(stops(forget, "has not waited"), "a kernel that does not wait at all");
  }
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
  test_floats_of_16_bits();
  test_lanes_that_part();
  test_barrier();
  test_tma();
  test_proxy_fence();
  test_reads_that_are_not_ended();
  test_wgmma();
  test_kernel_that_begins_early();
  test_what_is_refused();
  return report();
}
