// kernel_library.h: the C ABI between the core and a library of kernels
// (libcute_attention_<arch>.so).
//
// A kernel library exports one function, which returns its table of rows. The macro
// CUTE_ATTENTION_KERNEL_LIBRARY_ENTRY is the function's name. At the first call the core loads
// every such library that it finds, and refuses one that was built for another version of the ABI
// or of this package.
// All structs are plain data. The core never unloads a library, so pointers into it stay valid.
#pragma once

#include <cstdint>

#include "cute_attention/append_params.h"
#include "cute_attention/config.h"
#include "cute_attention/params.h"

#define CUTE_ATTENTION_KERNEL_LIBRARY_ENTRY cute_attention_kernel_library

namespace cute_attention {

// The version of the ABI. Whoever changes a struct of this file, of config.h or of params.h, or
// what a member of it means, raises it.
constexpr uint32_t kKernelLibraryAbi = 13;

// What dispatch and launch functions need to know of a GPU.
struct DeviceInfo {
  int32_t ordinal;
  int32_t compute_capability;  // major * 10 + minor
  int32_t multiprocessors;
  int32_t shared_memory_per_block;           // bytes, the opt-in limit
  int32_t shared_memory_per_multiprocessor;  // bytes
  int32_t l2_bytes;
  char name[64];
};

struct LaunchContext {
  DeviceInfo const* device;  // the current device
  void* stream;              // cudaStream_t
};

// Launches the row's kernels on the current device and returns the cudaError_t of the launch (0 is
// success). `params` points to a ForwardParams or a BackwardParams, as the row's direction says. In
// a ForwardParams num_splits is at least 1, and 1 where there is no workspace.
using LaunchFunction = int32_t (*)(void const* params, LaunchContext const* context);

// Says how large the workspaces of a backward call on `device` must be. Of the pointers in `params`
// it reads only whether cu_seqlens_q, cu_seqlens_k, sink and grad_bias.data are null.
using WorkspaceFunction = void (*)(BackwardParams const* params, DeviceInfo const* device,
                                   BackwardWorkspace* sizes);

// What the launch of a forward call would compute where keys are not divided.
struct ForwardGrid {
  int64_t tiles;    // of queries; of packed sequences as many as are expected
  int32_t queries;  // of a head, in a tile
};
// Of the pointers in `params` it reads only whether cu_seqlens_q and dropout.seed are null.
using GridFunction = ForwardGrid (*)(ForwardParams const* params);

// Launches the kernel that appends to a cache of `dtype` on the current device and returns the
// cudaError_t of the launch.
using AppendFunction = int32_t (*)(AppendParams const* params, DType dtype, void* stream);

// One row: which calls it serves, what a call needs, and how to launch it.
struct KernelRow {
  char const* name;  // the row's name in src/kernels/*.def
  KernelKey key;
  KernelConfig config;
  int32_t threads;              // of a CTA
  int32_t shared_memory_bytes;  // of a CTA, dynamic
  WorkspaceFunction workspace;  // null in forward rows
  LaunchFunction launch;
  GridFunction grid;  // null in backward rows
};

struct KernelLibrary {
  uint32_t abi;         // kKernelLibraryAbi
  char const* version;  // of this package, "0.1.0"; the core refuses another than its own
  char const* name;     // "sm80", "sm90"
  char const* build;    // compiler, targets and flags, for people
  int32_t row_count;
  KernelRow const* rows;

  // Only kernel libraries contain the CUDA runtime, each a static copy of its own. The core asks it
  // through these functions.
  int32_t (*device_count)();                                  // 0 where there is no driver
  int32_t (*device_info)(int32_t ordinal, DeviceInfo* out);   // returns a cudaError_t
  int32_t (*set_device)(int32_t ordinal, int32_t* previous);  // returns a cudaError_t
  char const* (*error_string)(int32_t cuda_error);

  AppendFunction append;
};

using KernelLibraryEntry = KernelLibrary const* (*)();

}  // namespace cute_attention
