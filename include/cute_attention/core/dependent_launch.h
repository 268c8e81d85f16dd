// core/dependent_launch.h: kernels that begin before the one that they depend on has ended (CUDA
// C++ Programming Guide, "Programmatic Dependent Launch"; PTX ISA, "griddepcontrol"). Only kernels
// of the sm90 libraries do so: elsewhere both functions do nothing, and the launch waits.
#pragma once

#include <cuda_runtime.h>

#include <cute/config.hpp>

namespace cute_attention {

// Launches a kernel, which begins before the kernel before it has ended if it `begins_early`: it
// then calls await_kernel_before() before it reads or writes what others write or read. Returns the
// error of the launch.
template <class... Parameters>
cudaError_t launch_kernel(bool begins_early, void (*kernel)(Parameters...), dim3 ctas, int threads,
                          int shared_memory_bytes, cudaStream_t stream,
                          Parameters const&... parameters) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = dim3(unsigned(threads));
  config.dynamicSmemBytes = size_t(shared_memory_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = begins_early ? 1 : 0;
  cudaError_t const error = cudaLaunchKernelEx(&config, kernel, parameters...);
  return error == cudaSuccess ? error : cudaGetLastError();  // CUDA forgets it
}

// Waits until the kernel before has ended, and what it wrote can be read.
CUTE_DEVICE void await_kernel_before() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets CTAs of the kernel after this one take what room the GPU has left, once all CTAs of this one
// have called it. Called by one thread of a CTA.
CUTE_DEVICE void start_kernel_after() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace cute_attention
