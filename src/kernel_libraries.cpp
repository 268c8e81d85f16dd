#include "kernel_libraries.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <regex>
#include <stdexcept>

#define CUTE_ATTENTION_STRING_OF(NAME) #NAME
#define CUTE_ATTENTION_STRING(NAME) CUTE_ATTENTION_STRING_OF(NAME)

namespace cute_attention {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> search_folders() {
  std::vector<fs::path> folders;
  if (char const* const path = std::getenv("CUTE_ATTENTION_KERNEL_PATH")) {
    std::string const list = path;
    for (size_t begin = 0; begin <= list.size();) {
      size_t const end = std::min(list.find(':', begin), list.size());
      if (end > begin) folders.emplace_back(list.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  Dl_info core;
  if (dladdr(reinterpret_cast<void const*>(&kernel_libraries), &core) != 0) {
    folders.push_back(fs::absolute(core.dli_fname).parent_path());
  }
  return folders;
}

bool is_kernel_library(fs::path const& path) {
  std::string const name = path.filename().string();
  return name.rfind("libcute_attention_", 0) == 0 && path.extension() == ".so" &&
         name != "libcute_attention_torch.so";
}

std::vector<fs::path> find_libraries() {
  std::vector<fs::path> found;
  for (fs::path const& folder : search_folders()) {
    std::vector<fs::path> here;
    std::error_code error;  // not looked at: a folder that cannot be read counts as empty
    for (auto const& entry : fs::directory_iterator(folder, error)) {
      fs::path const path = fs::weakly_canonical(entry.path(), error);
      if (is_kernel_library(path)) here.push_back(path);
    }
    std::sort(here.begin(), here.end());
    for (fs::path const& path : here) {
      if (std::find(found.begin(), found.end(), path) == found.end()) found.push_back(path);
    }
  }
  return found;
}

LoadedLibrary load(fs::path const& path) {
  LoadedLibrary library{path.string(), nullptr, ""};
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.error = dlerror();
    return library;
  }
  char const* const symbol = CUTE_ATTENTION_STRING(CUTE_ATTENTION_KERNEL_LIBRARY_ENTRY);
  auto const entry = reinterpret_cast<KernelLibraryEntry>(dlsym(handle, symbol));
  if (entry == nullptr) {
    library.error = std::string("it does not export ") + symbol;
    return library;
  }
  KernelLibrary const* const table = entry();
  if (table->abi != kKernelLibraryAbi) {
    library.error = "it has kernel ABI " + std::to_string(table->abi) + ", this core has " +
                    std::to_string(kKernelLibraryAbi) + ": rebuild it";
    return library;
  }
  library.table = table;
  return library;
}

// The pattern that the name of a row must match, so that dispatch may choose it. It is the
// environment variable CUTE_ATTENTION_ROWS; where that is not set, every row matches. With it one
// can run and measure a row instead of another row of the same key, which dispatch would prefer.
std::regex wanted_names() {
  char const* const pattern = std::getenv("CUTE_ATTENTION_ROWS");
  try {
    return std::regex(pattern == nullptr ? "" : pattern);
  } catch (std::regex_error const& error) {
    throw std::invalid_argument(std::string("CUTE_ATTENTION_ROWS is '") + pattern +
                                "', expected a regular expression: " + error.what());
  }
}

KernelLibraries load_all() {
  KernelLibraries all;
  std::regex const wanted = wanted_names();
  for (fs::path const& path : find_libraries()) {
    LoadedLibrary const& library = all.libraries.emplace_back(load(path));
    if (library.table == nullptr) continue;
    for (int32_t i = 0; i < library.table->row_count; ++i) {
      KernelRow const& row = library.table->rows[i];
      bool const taken = std::any_of(all.rows.begin(), all.rows.end(), [&](LoadedRow const& other) {
        return std::string(other.row->name) == row.name;
      });
      if (!taken && std::regex_search(row.name, wanted)) all.rows.push_back({&row, library.table});
    }
  }
  return all;
}

// The value of the environment variable CUTE_ATTENTION_SHARED_MEMORY, in bytes. The core takes
// every device for one that gives a CTA at most so much shared memory. So the rows for chips with
// little shared memory can be run on a larger chip.
int32_t shared_memory_limit() {
  char const* const text = std::getenv("CUTE_ATTENTION_SHARED_MEMORY");
  if (text == nullptr || *text == '\0') return std::numeric_limits<int32_t>::max();
  char* end = nullptr;
  long const bytes = std::strtol(text, &end, 10);
  if (*end != '\0' || bytes <= 0 || bytes > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument(std::string("CUTE_ATTENTION_SHARED_MEMORY is '") + text +
                                "', expected a number of bytes");
  }
  return static_cast<int32_t>(bytes);
}

std::vector<DeviceInfo> query_devices() {
  int32_t const limit = shared_memory_limit();
  for (LoadedLibrary const& library : kernel_libraries().libraries) {
    if (library.table == nullptr) continue;
    std::vector<DeviceInfo> found(library.table->device_count());
    for (size_t i = 0; i < found.size(); ++i) {
      int32_t const error = library.table->device_info(static_cast<int32_t>(i), &found[i]);
      if (error != 0) {
        throw std::runtime_error("device " + std::to_string(i) + ": " +
                                 library.table->error_string(error));
      }
      found[i].shared_memory_per_block = std::min(found[i].shared_memory_per_block, limit);
    }
    return found;
  }
  return {};
}

}  // namespace

KernelLibraries const& kernel_libraries() {
  static KernelLibraries const all = load_all();
  return all;
}

std::vector<DeviceInfo> const& devices() {
  static std::vector<DeviceInfo> const found = query_devices();
  return found;
}

}  // namespace cute_attention
