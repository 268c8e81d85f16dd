// element.h: ElementOf, the CUTLASS type of the numbers that a DType names.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "cute_attention/config.h"

namespace cute_attention {

template <DType kDType>
using ElementOf =
    std::conditional_t<kDType == DType::Float16, cutlass::half_t, cutlass::bfloat16_t>;

}  // namespace cute_attention
