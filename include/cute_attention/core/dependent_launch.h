// core/dependent_launch.h: kernels that begin before the one that they depend on has ended (CUDA
// C++ Programming Guide, "Programmatic Dependent Launch"; PTX ISA, "griddepcontrol"). Only kernels
// of the sm90 libraries do so: elsewhere both functions do nothing, and the launch waits.
#pragma once

#include <cute/config.hpp>

namespace cute_attention {

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
