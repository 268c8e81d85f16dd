// kernel_libraries.h: the kernel libraries of this process. The first call finds and loads them;
// they are never unloaded.
#pragma once

#include <string>
#include <vector>

#include "cute_attention/kernel_library.h"

namespace cute_attention {

struct LoadedLibrary {
  std::string path;
  KernelLibrary const* table;  // null if the core refused the library
  std::string error;           // why the core refused it; empty if it did not
};

struct LoadedRow {
  KernelRow const* row;
  KernelLibrary const* library;
};

struct KernelLibraries {
  std::vector<LoadedLibrary> libraries;
  std::vector<LoadedRow> rows;
};

// Loads every libcute_attention_*.so: first those in the folders of the environment variable
// CUTE_ATTENTION_KERNEL_PATH, then those in the folder of the core itself, then those in the
// folders that were added. If two libraries have a row of the same name, dispatch uses the one that
// was found first. So a row that was rebuilt elsewhere replaces the installed one. A library of
// another kernel ABI, or of another version than the core, is refused.
KernelLibraries const& kernel_libraries();

// Adds a folder to those that kernel_libraries() searches. Throws std::invalid_argument for a new
// folder if the libraries have been loaded.
void add_kernel_folder(std::string const& folder);

// The GPUs that the kernel libraries see, in CUDA's order; the first call initialises CUDA.
std::vector<DeviceInfo> const& devices();

}  // namespace cute_attention
