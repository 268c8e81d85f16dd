#include "kernel_libraries.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <regex>
#include <stdexcept>
#include <utility>

#include "cute_attention/c_api.h"

#define CUTE_ATTENTION_STRING_OF(NAME) #NAME
#define CUTE_ATTENTION_STRING(NAME) CUTE_ATTENTION_STRING_OF(NAME)

namespace cute_attention {
namespace {

std::string const kLibraryPrefix = "libcute_attention_";
std::string const kLibrarySuffix = ".so";

// The folders that callers added; add_kernel_folder() fills it until the libraries are loaded.
std::mutex added_mutex;
std::vector<std::string> added_folders;
bool added_all = false;

std::string folder_of(std::string const& path) { return path.substr(0, path.rfind('/')); }

// The path without links and dots; the path itself if there is no such file.
std::string canonical(std::string const& path) {
  std::unique_ptr<char, decltype(&std::free)> const real(realpath(path.c_str(), nullptr),
                                                         &std::free);
  return real == nullptr ? path : real.get();
}

std::vector<std::string> search_folders() {
  std::vector<std::string> folders;
  if (char const* const path = std::getenv("CUTE_ATTENTION_KERNEL_PATH")) {
    std::string const list = path;
    for (size_t begin = 0; begin <= list.size();) {
      size_t const end = std::min(list.find(':', begin), list.size());
      if (end > begin) folders.push_back(list.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  Dl_info core;
  if (dladdr(reinterpret_cast<void const*>(&kernel_libraries), &core) != 0) {
    folders.push_back(folder_of(canonical(core.dli_fname)));
  }
  std::lock_guard<std::mutex> const lock(added_mutex);
  added_all = true;
  folders.insert(folders.end(), added_folders.begin(), added_folders.end());
  return folders;
}

bool is_kernel_library(std::string const& name) {
  return name.rfind(kLibraryPrefix, 0) == 0 && name.size() > kLibrarySuffix.size() &&
         name.compare(name.size() - kLibrarySuffix.size(), std::string::npos, kLibrarySuffix) ==
             0 &&
         name != "libcute_attention_torch.so";
}

// std::filesystem is not used: its functions are not in the libstdc++ of manylinux_2_28.
std::vector<std::string> find_libraries() {
  std::vector<std::string> found;
  for (std::string const& folder : search_folders()) {
    std::vector<std::string> here;
    // A folder that cannot be read counts as empty.
    std::unique_ptr<DIR, int (*)(DIR*)> const directory(opendir(folder.c_str()), &closedir);
    while (dirent const* const entry = directory ? readdir(directory.get()) : nullptr) {
      if (is_kernel_library(entry->d_name)) here.push_back(canonical(folder + '/' + entry->d_name));
    }
    std::sort(here.begin(), here.end());
    for (std::string const& path : here) {
      if (std::find(found.begin(), found.end(), path) == found.end()) found.push_back(path);
    }
  }
  return found;
}

// What mends a library that does not fit this core: the package that contains the right one, if
// there is a package of that family, or another build.
std::string remedy(std::string const& path) {
  size_t const begin = path.rfind('/') + 1 + kLibraryPrefix.size();
  std::string const family = path.substr(begin, path.size() - kLibrarySuffix.size() - begin);
  if (family != "sm80" && family != "sm90") return "rebuild it";
  return "pip install \"cute-attention[" + family +
         "]==" CUTE_ATTENTION_VERSION "\", or rebuild it";
}

// What tells a file from another one at the same path; empty if there is no file.
std::string identity_of(std::string const& path) {
  struct statx file;  // stat() has the version of glibc 2.33
  if (statx(AT_FDCWD, path.c_str(), 0, STATX_INO | STATX_SIZE | STATX_MTIME, &file) != 0) return "";
  std::string text;
  for (int64_t const part :
       {int64_t(file.stx_dev_major), int64_t(file.stx_dev_minor), int64_t(file.stx_ino),
        int64_t(file.stx_size), int64_t(file.stx_mtime.tv_sec), int64_t(file.stx_mtime.tv_nsec)}) {
    text += std::to_string(part) + ' ';
  }
  return text;
}

LoadedLibrary load(std::string const& path) {
  LoadedLibrary library{path, nullptr, "", identity_of(path)};
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
                    std::to_string(kKernelLibraryAbi) + ": " + remedy(path);
    return library;
  }
  if (table->version != std::string(CUTE_ATTENTION_VERSION)) {
    library.error = std::string("it is of version ") + table->version +
                    ", this core of version " CUTE_ATTENTION_VERSION ": " + remedy(path);
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

// The loaded row of a name; null where there is none.
LoadedRow const* row_named(KernelLibraries const& all, std::string const& name) {
  auto const found = std::find_if(all.rows.begin(), all.rows.end(),
                                  [&](LoadedRow const& each) { return each.row->name == name; });
  return found == all.rows.end() ? nullptr : &*found;
}

void add_row(KernelLibraries* all, KernelRow const& row, KernelLibrary const* table,
             bool on_request) {
  int32_t const number = kFirstRow + static_cast<int32_t>(all->rows.size());
  all->rows.push_back({&row, table, number, on_request});
}

KernelLibraries load_all() {
  KernelLibraries all;
  std::regex const wanted = wanted_names();
  for (std::string const& path : find_libraries()) {
    LoadedLibrary const& library = all.libraries.emplace_back(load(path));
    if (library.table == nullptr) continue;
    for (int32_t i = 0; i < library.table->row_count; ++i) {
      KernelRow const& row = library.table->rows[i];
      if (row_named(all, row.name) == nullptr && std::regex_search(row.name, wanted)) {
        add_row(&all, row, library.table, false);
      }
    }
  }
  return all;
}

// What is loaded now, null before the first call. Older versions are kept, since rows of theirs may
// be in use; whoever adds a version holds the mutex.
std::atomic<KernelLibraries const*> current{nullptr};
std::mutex versions_mutex;

void publish(KernelLibraries all) {
  static auto& versions = *new std::deque<KernelLibraries>;  // never destroyed: threads may run on
  current.store(&versions.emplace_back(std::move(all)));
}

// Whether the file is loaded. Throws if another file was loaded from its path.
bool is_loaded(KernelLibraries const& all, std::string const& path) {
  for (LoadedLibrary const& library : all.libraries) {
    if (library.path != path || library.table == nullptr) continue;
    if (library.identity == identity_of(path)) return true;
    throw std::runtime_error(path +
                             ": the file has changed since this process loaded it, and a process "
                             "loads a path once: give the new file another name");
  }
  return false;
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
  if (KernelLibraries const* const all = current.load()) return *all;
  std::lock_guard<std::mutex> const lock(versions_mutex);
  if (current.load() == nullptr) publish(load_all());
  return *current.load();
}

void load_library(std::string const& path, bool on_request) {
  kernel_libraries();
  std::lock_guard<std::mutex> const lock(versions_mutex);
  KernelLibraries all = *current.load();
  std::string const real = canonical(path);
  if (is_loaded(all, real)) return;
  LoadedLibrary const library = load(real);
  if (library.table == nullptr) throw std::runtime_error(real + ": " + library.error);
  std::regex const wanted = on_request ? std::regex("") : wanted_names();
  for (int32_t i = 0; i < library.table->row_count; ++i) {
    KernelRow const& row = library.table->rows[i];
    if (row_named(all, row.name) != nullptr) {
      throw std::runtime_error(real + ": a row called " + row.name + " is loaded already");
    }
    if (std::regex_search(row.name, wanted)) add_row(&all, row, library.table, on_request);
  }
  all.libraries.push_back(library);
  publish(std::move(all));
}

void add_kernel_folder(std::string const& folder) {
  std::lock_guard<std::mutex> const lock(added_mutex);
  if (std::find(added_folders.begin(), added_folders.end(), folder) != added_folders.end()) return;
  if (added_all) {
    throw std::invalid_argument("folder is " + folder +
                                ", expected before the kernel libraries are loaded");
  }
  added_folders.push_back(folder);
}

std::vector<DeviceInfo> const& devices() {
  static std::mutex mutex;
  static auto const& none = *new std::vector<DeviceInfo>;  // never destroyed, like what follows
  static auto& found = *new std::vector<DeviceInfo>;  // written once, before anybody has seen it
  static std::atomic<bool> known{false};
  if (known.load()) return found;
  std::lock_guard<std::mutex> const lock(mutex);
  if (known.load()) return found;
  std::vector<DeviceInfo> now = query_devices();
  if (now.empty()) return none;  // a library that can see devices may be loaded later
  found = std::move(now);
  known.store(true);
  return found;
}

}  // namespace cute_attention
