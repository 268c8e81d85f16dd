// device.cu: the functions of a kernel library that ask the CUDA runtime about devices and errors.
// The runtime is linked into each library statically.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>

#include "append_tokens.h"
#include "device.h"

namespace cute_attention {
namespace {

int32_t device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  // Without a driver there are no devices, which is an answer and no error. This call clears CUDA's
  // record of the error, which a later launch would otherwise report as its own.
  cudaGetLastError();
  return 0;
}

int32_t device_info(int32_t ordinal, DeviceInfo* out) {
  cudaDeviceProp properties;
  if (cudaError_t const error = cudaGetDeviceProperties(&properties, ordinal)) return error;
  out->ordinal = ordinal;
  out->compute_capability = properties.major * 10 + properties.minor;
  out->multiprocessors = properties.multiProcessorCount;
  out->shared_memory_per_block = static_cast<int32_t>(properties.sharedMemPerBlockOptin);
  out->shared_memory_per_multiprocessor =
      static_cast<int32_t>(properties.sharedMemPerMultiprocessor);
  out->l2_bytes = properties.l2CacheSize;
  std::snprintf(out->name, sizeof(out->name), "%s", properties.name);
  return cudaSuccess;
}

// Whether a context is current in this thread. In a thread that has not used CUDA yet none is, such
// as the one in which autograd runs its first backward, although cudaGetDevice names a device
// there.
bool has_context() {
  static auto const current = [] {  // cuCtxGetCurrent: the library is not linked with libcuda
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaError_t const error = cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 4000,
                                                               cudaEnableDefault, &found);
    bool const usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return usable ? reinterpret_cast<decltype(&cuCtxGetCurrent)>(function) : nullptr;
  }();
  CUcontext context = nullptr;
  return current != nullptr && current(&context) == CUDA_SUCCESS && context != nullptr;
}

// cudaSetDevice also makes the device's context current, which the driver needs to make tensor
// maps. Every launch comes after a call of this function: so it has CUDA forget the error of an
// earlier call that failed, which the launch would report as its own.
int32_t set_device(int32_t ordinal, int32_t* previous) {
  cudaError_t error = cudaGetDevice(previous);
  if (error == cudaSuccess && !(*previous == ordinal && has_context())) {
    error = cudaSetDevice(ordinal);
  }
  cudaGetLastError();
  return error;
}

char const* error_string(int32_t cuda_error) {
  return cudaGetErrorString(static_cast<cudaError_t>(cuda_error));
}

}  // namespace

KernelLibrary kernel_library(char const* name, char const* build, KernelRow const* rows,
                             int32_t row_count) {
  return {
      kKernelLibraryAbi, CUTE_ATTENTION_VERSION, name,        build,         row_count,     rows,
      &device_count,     &device_info,           &set_device, &error_string, &append_tokens};
}

}  // namespace cute_attention
