// reports.h: what c_api.h says as JSON: the library itself, what it has loaded, and what it would
// do.
#pragma once

#include "cute_attention/c_api.h"
#include "json.h"

namespace cute_attention {

Json build_report();
Json libraries_report();
Json kernels_report();
Json devices_report();
// Each row, with the reasons why it does not serve the problem, or how fast it is thought to be.
// `device` may be kNoDevice.
Json explain_report(Problem const& problem, int32_t device);

}  // namespace cute_attention
