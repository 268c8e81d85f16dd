// kernel_library.h: the C ABI between the core and a library of kernels
// (libcute_attention_<arch>.so).
//
// A kernel library exports one function, named by CUTE_ATTENTION_KERNEL_LIBRARY_ENTRY, that returns
// its table. The core loads every such library it finds at the first call and refuses one of
// another ABI version. All structs are plain data and outlive the process's use of them.
#pragma once

#include <cstdint>

#include "cute_attention/config.h"
#include "cute_attention/params.h"

#define CUTE_ATTENTION_KERNEL_LIBRARY_ENTRY cute_attention_kernel_library

namespace cute_attention {

// Raised with every change to a struct of this file, of config.h or of params.h.
constexpr uint32_t kKernelLibraryAbi = 5;

// What dispatch and launchers need to know of a device.
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

// Launches a kernel on the current device and returns the cudaError_t of the launch (0 is success).
// `params` is a ForwardParams or BackwardParams, as the row's direction says.
using LaunchFunction = int32_t (*)(void const* params, LaunchContext const* context);

struct KernelRow {
  char const* name;  // the row's name in src/kernels/*.def
  KernelKey key;
  KernelConfig config;
  int32_t threads;              // of a CTA
  int32_t shared_memory_bytes;  // of a CTA, dynamic
  LaunchFunction launch;
};

struct KernelLibrary {
  uint32_t abi;       // kKernelLibraryAbi
  char const* name;   // "sm80", "sm90"
  char const* build;  // compiler, targets and flags, for people
  int32_t row_count;
  KernelRow const* rows;

  // CUDA is linked statically into each kernel library, and only there: the core asks through
  // these.
  int32_t (*device_count)();                                  // 0 where there is no driver
  int32_t (*device_info)(int32_t ordinal, DeviceInfo* out);   // returns a cudaError_t
  int32_t (*set_device)(int32_t ordinal, int32_t* previous);  // returns a cudaError_t
  char const* (*error_string)(int32_t cuda_error);
};

using KernelLibraryEntry = KernelLibrary const* (*)();

}  // namespace cute_attention
