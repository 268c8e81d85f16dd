// device.h: the part that every kernel library shares: its table's header and its questions to the
// CUDA runtime.
#pragma once

#include "cute_attention/kernel_library.h"

namespace cute_attention {

KernelLibrary kernel_library(char const* name, char const* build, KernelRow const* rows,
                             int32_t row_count);

}  // namespace cute_attention
