// fake_device.cpp: stands in for src/device.cu where a test has a row compiled without nvcc: a
// machine with one GPU, of compute capability 8.0.
#include "device.h"

namespace cute_attention {
namespace {

int32_t device_count() { return 1; }

int32_t device_info(int32_t ordinal, DeviceInfo* out) {
  *out = {ordinal, 80, 108, 163 * 1024, 164 * 1024, 40 << 20, "made-up GPU"};
  return 0;
}

int32_t set_device(int32_t ordinal, int32_t* previous) {
  *previous = ordinal;
  return 0;
}

char const* error_string(int32_t) { return "nothing was computed"; }

}  // namespace

KernelLibrary kernel_library(char const* name, char const* build, KernelRow const* rows,
                             int32_t row_count) {
  return {kKernelLibraryAbi, CUTE_ATTENTION_VERSION, name,        build,        row_count, rows,
          &device_count,     &device_info,           &set_device, &error_string};
}

}  // namespace cute_attention
