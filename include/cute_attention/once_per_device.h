// once_per_device.h: what a launch asks of CUDA the first time on each device, and not again.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace cute_attention {

class OncePerDevice {
 public:
  // Calls `function`, which returns a cudaError_t, unless it has succeeded for this device. Threads
  // that are first at the same time all call it; so does every call for a device above 63.
  template <class Function>
  cudaError_t run(int32_t device, Function const& function) {
    uint64_t const bit = device < 64 ? uint64_t(1) << device : 0;
    if (done_.load(std::memory_order_acquire) & bit) {
      return cudaSuccess;
    }
    cudaError_t const error = function();
    if (error == cudaSuccess) {
      done_.fetch_or(bit, std::memory_order_release);
    }
    return error;
  }

 private:
  std::atomic<uint64_t> done_{0};  // a bit for each device
};

// Lets CTAs of a kernel have `bytes` of dynamic shared memory on `device`, the current one.
template <auto kKernel>
cudaError_t allow_shared_memory(int32_t bytes, int32_t device) {
  static OncePerDevice allowed;
  return allowed.run(device, [&] {
    return cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  });
}

}  // namespace cute_attention
