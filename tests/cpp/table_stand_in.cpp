// table_stand_in.cpp: a kernel library without CUDA that has every row of the tables, as they stand
// in src/kernels/*.def, on one device that is a Hopper GPU: for tests of which row a call gets. A
// launch fails.
#include "cute_attention/kernel_library.h"
#include "kernels/rows.h"

namespace cute_attention {
namespace {

constexpr int32_t kNotLaunched = 1;

int32_t launch(void const*, LaunchContext const*) { return kNotLaunched; }
void workspace(BackwardParams const*, DeviceInfo const*, BackwardWorkspace* sizes) { *sizes = {}; }

// Rows of equal head dims need the more shared memory, the larger their tiles are, as the real ones
// do.
template <class Row>
constexpr KernelRow row() {
  constexpr KernelConfig kConfig = Row::kConfig;
  constexpr bool kBackward = Row::kKey.direction == Direction::Backward;
  return {Row::kName,
          Row::kKey,
          kConfig,
          kConfig.warps * 32,
          kConfig.tile_m + kConfig.tile_n,
          kBackward ? &workspace : nullptr,
          &launch,
          nullptr};
}

KernelRow const kRows[] = {
#define CUTE_ATTENTION_FORWARD(NAME, ...) row<rows::NAME>(),
#define CUTE_ATTENTION_BACKWARD(NAME, ...) row<rows::NAME>(),
#include "kernels/backward.def"
#include "kernels/forward.def"
#undef CUTE_ATTENTION_FORWARD
#undef CUTE_ATTENTION_BACKWARD
};

int32_t device_count() { return 1; }
int32_t device_info(int32_t, DeviceInfo* out) {
  *out = {0, 90, 132, 227 * 1024, 228 * 1024, 50 << 20, "Hopper stand-in"};
  return 0;
}
int32_t set_device(int32_t, int32_t* previous) {
  *previous = 0;
  return 0;
}
char const* error_string(int32_t) { return "a stand-in computes nothing"; }

}  // namespace

extern "C" __attribute__((visibility("default"))) KernelLibrary const*
CUTE_ATTENTION_KERNEL_LIBRARY_ENTRY() {
  static KernelLibrary const library{kKernelLibraryAbi,
                                     CUTE_ATTENTION_VERSION,
                                     "tables",
                                     "g++",
                                     int32_t(sizeof(kRows) / sizeof(kRows[0])),
                                     kRows,
                                     &device_count,
                                     &device_info,
                                     &set_device,
                                     &error_string};
  return &library;
}

}  // namespace cute_attention
