// device.h: the part of a KernelLibrary that is the same in every kernel library: the ABI, the
// version and the functions that ask the CUDA runtime.
#pragma once

#include "cute_attention/kernel_library.h"

namespace cute_attention {

// What the library exports: `rows` is its table of `row_count` rows, which must outlive it.
KernelLibrary kernel_library(char const* name, char const* build, KernelRow const* rows,
                             int32_t row_count);

}  // namespace cute_attention
