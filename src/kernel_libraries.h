// kernel_libraries.h: the kernel libraries of this process. The first call finds and loads them,
// and more can be loaded later; they are never unloaded.
#pragma once

#include <string>
#include <vector>

#include "cute_attention/kernel_library.h"

namespace cute_attention {

struct LoadedLibrary {
  std::string path;
  KernelLibrary const* table;  // null if the core refused the library
  std::string error;           // why the core refused it; empty if it did not
  std::string identity;        // of the file that was loaded: another file at `path` differs in it
};

struct LoadedRow {
  KernelRow const* row;
  KernelLibrary const* library;
  int32_t number;   // kFirstRow (c_api.h) and up, in the order in which rows were loaded
  bool on_request;  // it serves only calls that ask for this very row
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
//
// What is returned never changes and stays valid: after load_library() the function returns another
// object, whose first libraries and rows are the same.
KernelLibraries const& kernel_libraries();

// Loads one more library. Its rows take part in every choice from now on or, with `on_request`,
// only in calls that ask for one of them by its number. A file that is loaded already is not loaded
// again and stays as it was loaded first. Throws std::runtime_error for a library that the core
// refuses, for a file that has changed since it was loaded, and for one with a row whose name is
// taken.
void load_library(std::string const& path, bool on_request);

// Adds a folder to those that kernel_libraries() searches. Throws std::invalid_argument for a new
// folder if the libraries have been loaded.
void add_kernel_folder(std::string const& folder);

// The GPUs that the kernel libraries see, in CUDA's order; the first call initialises CUDA.
std::vector<DeviceInfo> const& devices();

}  // namespace cute_attention
