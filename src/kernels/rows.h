// rows.h: the tables as types: the tag type of every row (row.h). It takes no launcher's address,
// so that a file that includes it compiles no kernel.
#pragma once

#include "kernels/row.h"

namespace cute_attention::rows {
#include "backward.def"
#include "forward.def"
}  // namespace cute_attention::rows

#undef CUTE_ATTENTION_FORWARD
#undef CUTE_ATTENTION_BACKWARD
#undef CUTE_ATTENTION_ROW
