// sm90/dependent_launch.h: kernels that begin while the kernel before them in the stream still
// ends: their CTAs take the multiprocessors as they become free, and set up what needs no results
// (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").
#pragma once

#include <cuda_runtime.h>

#include <cute/config.hpp>

namespace cute_attention::sm90 {

// Lets the next kernel of the stream begin once all CTAs of this grid have said so, if it was
// launched with launch_dependent().
CUTE_DEVICE void let_next_kernel_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before is complete, and its results can be read. Every thread calls it
// before it reads or writes global memory.
CUTE_DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Launches a kernel that may begin before the kernel before it is complete. It must call
// await_kernel_before().
template <class... Parameters>
cudaError_t launch_dependent(void (*kernel)(Parameters...), int64_t ctas, int32_t threads,
                             int32_t shared_bytes, cudaStream_t stream,
                             Parameters const&... parameters) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas));
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, parameters...);
}

}  // namespace cute_attention::sm90
