#include "cost_model.h"

#include <algorithm>

namespace cute_attention {
namespace {

constexpr double kClocksPerUs =
    1500;  // a typical clock: the same for every row, so it ranks nothing
constexpr double kEfficiency = 0.75;         // of the peak that a row's inner loop reaches
constexpr double kEfficiencyOfThree = 0.78;  // ... of one with three computing warpgroups
constexpr double kExpsPerClock = 16;         // MUFU results a clock and SM
constexpr double kTurnClocks = 2500;  // a CTA's prologue and epilogue: Q and the first K in, O out
constexpr double kTileClocks = 200;   // of a key tile beside its arithmetic: barriers, row maxima
constexpr double kLaunchUs = 3;
constexpr int32_t kReservedSharedMemory = 1024;  // that CUDA keeps for itself, per CTA
constexpr int32_t kWarpsOfTwo = 12;              // of a producer and two consumer warpgroups
constexpr int32_t kSaturatingWarps = 8;          // warps that keep an SM's tensor cores busy

// Dense 16-bit multiply-adds with fp32 sums, times two, a clock and SM (the chips' white papers;
// mma.sync on Hopper reaches five eighths of WGMMA).
double flops_per_clock(Arch arch, int32_t compute_capability) {
  if (arch == Arch::Sm90) return 4096;
  switch (compute_capability) {
    case 80:
      return 2048;
    case 90:
      return 2560;
    default:
      return compute_capability >= 100 && compute_capability < 120 ? 2560 : 1024;
  }
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

TileWork tile_work(Problem const& problem, KernelConfig const& config) {
  int64_t const shift = int64_t{problem.seqlen_k} - problem.seqlen_q;
  TileWork work{ceil_div(problem.seqlen_q, config.tile_m), 0, 0};
  for (int64_t m_block = 0; m_block < work.ctas; ++m_block) {
    int64_t const first_query = m_block * config.tile_m;
    int64_t const last_query = std::min<int64_t>(first_query + config.tile_m, problem.seqlen_q) - 1;
    int64_t const first_key = std::max<int64_t>(0, first_query + shift - problem.window_left);
    int64_t const last_key =
        std::min<int64_t>(problem.seqlen_k - 1, last_query + shift + problem.window_right);
    if (last_key < first_key) continue;
    int64_t const tiles = last_key / config.tile_n - first_key / config.tile_n + 1;
    work.tiles += tiles;
    work.longest = std::max(work.longest, tiles);
  }
  return work;
}

double estimate_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device) {
  TileWork const work = tile_work(problem, row.config);
  int64_t const ctas = work.ctas * problem.heads * problem.batch;
  if (ctas == 0) return 0;

  double const scores = double(row.config.tile_m) * row.config.tile_n;
  double const flops = 2 * scores * (row.key.head_dim + row.key.head_dim_v);
  double const tile_clocks =
      std::max(flops / flops_per_clock(row.key.arch, device.compute_capability),
               scores / kExpsPerClock) /
          (row.config.warps > kWarpsOfTwo ? kEfficiencyOfThree : kEfficiency) +
      kTileClocks;

  int32_t const fitting =
      device.shared_memory_per_multiprocessor / (row.shared_memory_bytes + kReservedSharedMemory);
  int64_t const resident = std::max<int32_t>(1, std::min(fitting, 1536 / row.threads));
  int64_t const per_multiprocessor = ceil_div(ctas, device.multiprocessors);
  double const busy_warps = double(std::min(resident, per_multiprocessor)) * row.threads / 32;
  double const share = std::min(1.0, busy_warps / kSaturatingWarps);

  // An SM shares its tensor cores among its CTAs; the busiest CTA alone is the shortest possible
  // time.
  double const mean_tiles = double(work.tiles) / double(work.ctas);
  double const tiles = std::max(double(per_multiprocessor) * mean_tiles, double(work.longest));
  double const turns = double(ceil_div(ctas, device.multiprocessors * resident));
  return kLaunchUs + (tiles * tile_clocks / share + turns * kTurnClocks) / kClocksPerUs;
}

}  // namespace cute_attention
