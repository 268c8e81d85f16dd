// kernel_libraries.h: the kernel libraries of this process: found and loaded at the first call,
// never unloaded.
#pragma once

#include <string>
#include <vector>

#include "cute_attention/kernel_library.h"

namespace cute_attention {

struct LoadedLibrary {
  std::string path;
  KernelLibrary const* table;  // null where it was refused
  std::string error;           // why it was refused
};

struct LoadedRow {
  KernelRow const* row;
  KernelLibrary const* library;
};

struct KernelLibraries {
  std::vector<LoadedLibrary> libraries;
  std::vector<LoadedRow> rows;
};

// Every libcute_attention_*.so in the folders of CUTE_ATTENTION_KERNEL_PATH, then in the core's
// own. Where two have a row of the same name, the one found first serves: a row rebuilt elsewhere
// replaces the installed one.
KernelLibraries const& kernel_libraries();

// The GPUs that the kernel libraries see, in CUDA's order; the first call initialises CUDA.
std::vector<DeviceInfo> const& devices();

}  // namespace cute_attention
