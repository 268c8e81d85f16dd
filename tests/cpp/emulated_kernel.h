// emulated_kernel.h: runs a small kernel, written in PTX by a test, in the emulator
// (docs/emulator.md).
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "emulator/machine.h"
#include "emulator/tensor_map.h"

namespace cute_attention::testing {

using emulator::Timing;

constexpr uint32_t kSharedBytes = 16384;

// A kernel of this body. %rd1 is the address of `data`, %rd2 of a tensor map of it, %r2 of the
// shared memory, %r1 the thread.
inline std::string program(std::string const& body) {
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
inline std::string const kOwnPlace = "mul.wide.u32 %rd3, %r1, 4; add.s64 %rd3, %rd1, %rd3;\n";

// Runs a kernel over `data`, a tensor [8, 64] of 16-bit floats to TMA.
inline void run_kernel(std::string const& body, std::vector<uint32_t>& data, int threads = 32,
                       Timing timing = Timing::kPrompt, uint64_t seed = 0) {
  emulator::Module module;
  emulator::parse(program(body), module);
  emulator::Grid grid;
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
    emulator::encode_tensor_map(parameters + 64, kBFloat16, 2, data.data(), sizes, strides, box,
                                steps, 0, kSwizzle128, 0, 0);
  }
  grid.parameters = parameters;
  emulator::run(grid, 1);
}

inline std::vector<uint32_t> result_of(std::string const& body, int threads = 32,
                                       Timing timing = Timing::kPrompt) {
  std::vector<uint32_t> data(256, 0);
  run_kernel(kOwnPlace + body + "\nst.global.u32 [%rd3], %r9;", data, threads, timing);
  return data;
}

// Whether a process that does this ends with the emulator's message about `reason`.
inline bool stops(std::function<void()> const& action, std::string const& reason) {
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

}  // namespace cute_attention::testing
