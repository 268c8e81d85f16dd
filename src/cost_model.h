// cost_model.h: estimates how long a forward row takes for a problem. The estimates serve to
// compare rows that can all compute the problem; they do not predict the time of one.
#pragma once

#include "cute_attention/c_api.h"
#include "cute_attention/kernel_library.h"

namespace cute_attention {

// The work of one head. It is counted in whole tiles, so that it includes the scores that a CTA
// computes in vain: those that the mask hides, and those past the end of a sequence.
struct TileWork {
  int64_t ctas;     // tiles of queries; one CTA computes each
  int64_t tiles;    // key tiles that all these CTAs visit together
  int64_t longest;  // key tiles that the CTA with the most of them visits
};
TileWork tile_work(Problem const& problem, KernelConfig const& config);

// The estimated time of the row for the problem on the device, in microseconds.
double estimate_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device);

// The same for a row and a device that need not be there. Throws std::invalid_argument where a
// number of the question is not positive.
double estimate_us(CostQuestion const& question, Problem const& problem);

}  // namespace cute_attention
