// append_tokens.h: launches the kernel that appends to a cache.
#pragma once

#include "cute_attention/append_params.h"
#include "cute_attention/config.h"

namespace cute_attention {

// An AppendFunction (kernel_library.h).
int32_t append_tokens(AppendParams const* params, DType dtype, void* stream);

}  // namespace cute_attention
