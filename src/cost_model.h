// cost_model.h: estimates how long a row takes for a problem. The estimates serve to compare rows
// that can all compute the problem; they do not predict the time of one. Of backward rows it knows
// those of sm90 above head dim 128; the others it takes for forward rows.
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

  double mean() const { return double(tiles) / double(ctas); }
};
TileWork tile_work(Problem const& problem, KernelConfig const& config);

// The mean key tiles of a CTA of an sm90 row, of which each warpgroup of 64 queries visits those
// that its own queries see.
double warpgroup_tiles(Problem const& problem, KernelConfig const& config);

// A typical clock rate. The estimates of all rows use the same one, so it does not change which of
// them is the smallest.
constexpr double kClocksPerUs = 1500;

// What every launch takes.
constexpr double kLaunchUs = 3;

// How long a CTA of the row takes for a key tile if it has an SM for itself.
double tile_clocks(KernelRow const& row, DeviceInfo const& device);

// How many CTAs of the row an SM runs at the same time.
int64_t resident_ctas(KernelRow const& row, DeviceInfo const& device);

// The work of a launch.
struct GridWork {
  int64_t ctas;
  double mean_tiles;   // key tiles of a CTA
  double longest;      // of the CTA with the most of them
  double tile_clocks;  // of a key tile
};
// The estimated time of the launch, in microseconds, without what every launch takes.
double grid_us(KernelRow const& row, DeviceInfo const& device, GridWork const& work);

// The estimated time of the row for the problem on the device, in microseconds.
double estimate_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device);

// The same for a row and a device that need not be there. Throws std::invalid_argument where a
// number of the question is not positive.
double estimate_us(CostQuestion const& question, Problem const& problem);

}  // namespace cute_attention
