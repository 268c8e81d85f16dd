// test_emulator_waits.cpp: that missing barriers, waits and fences of asynchronous work show in the
// emulator: those of threads, of TMA, of WGMMA and of kernels that begin early.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "emulated_kernel.h"
#include "emulator/numbers.h"

namespace {

using namespace cute_attention::emulator;
using namespace cute_attention::testing;

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

}  // namespace

int main() {
  test_barrier();
  test_tma();
  test_proxy_fence();
  test_reads_that_are_not_ended();
  test_wgmma();
  test_kernel_that_begins_early();
  return report();
}
