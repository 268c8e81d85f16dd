#include "cost_model.h"

#include <algorithm>
#include <stdexcept>

#include "cute_attention/core/resident_warps.h"

namespace cute_attention {
namespace {

constexpr double kExpsPerClock = 16;  // exponentials (MUFU results) that an SM computes in a clock

// What kinds of rows differ in.
struct RowCosts {
  double efficiency;   // the share of the peak that the inner loop reaches
  double cta_clocks;   // before and after the key tiles of a CTA: it loads Q and the first K, and
                       // stores O
  double tile_clocks;  // of a key tile, in addition to its arithmetic: barriers, maxima of rows
};
constexpr RowCosts kSm80Costs{0.75, 2500, 200};
// Of sm90 rows by the number of consumer warpgroups, fitted to 155 shapes of head dims 64, 96 and
// 128 that were measured with each of two or three rows on an H100.
constexpr RowCosts kTwoConsumerCosts = kSm80Costs;
constexpr RowCosts kThreeConsumerCosts{0.82, 3200, 200};
// Of sm90 rows whose CTAs share an SM (ForwardTraits::kSharesSm): one computes while another waits
// in a barrier or for its first K. Fitted to 53 shapes of head dim 64 that were measured with each
// of the three rows. The rows that are chosen take 1.002 times as long as the fastest ones in the
// mean on an H200, and 1.08 at worst; 1.006 and 1.12 on an H100, whose memory is slower.
constexpr RowCosts kSharingCosts{0.53, 1000, 40};
// What a warpgroup without queries takes of the time of those beside it: their products and their
// softmax wait for each other more.
constexpr double kIdleShare = 0.5;
// In such a row nobody else of the CTA computes while its products and its softmax wait for each
// other, so that a key tile of the longest CTA takes so long at least.
constexpr double kTileClocksAlone = 1000;
constexpr int32_t kReservedSharedMemory = 1024;  // bytes of each CTA that CUDA keeps for itself
constexpr int32_t kWarpgroupThreads = 128;
constexpr int32_t kWarpsOfTwoConsumers = 12;  // a producer warpgroup and two that compute
constexpr int32_t kWarpgroupQueries = 64;
constexpr int32_t kSaturatingWarps = 8;  // so many warps keep the tensor cores of an SM busy

// Backward rows of sm90 above head dim 128, of which two may serve the same calls: one keeps no
// sums of dQ, the other does (sm90/backward_chunks.h). With sums a tile of scores takes so much of
// what it takes without, and the kernels before and after take so many clocks for each query.
// Fitted to 11 shapes that were measured with both on an H100, of which each has the faster one.
constexpr double kShareWithSums = 0.82;
constexpr double kClocksOfSummedQuery = 30;
constexpr int32_t kKeysWithoutSums = 64;  // of a CTA

// The floating-point operations that the tensor cores of one SM do in a clock: multiply-adds of
// dense 16-bit numbers with fp32 sums, each counted as two. The figures are from the white papers
// of the chips. On Hopper mma.sync reaches five eighths of what WGMMA does.
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

bool shares_multiprocessor(KernelRow const& row, DeviceInfo const& device) {
  return row.key.arch == Arch::Sm90 && row.key.direction == Direction::Forward &&
         resident_ctas(row, device) > 1;
}

RowCosts const& costs_of(KernelRow const& row, DeviceInfo const& device) {
  return row.key.arch != Arch::Sm90                 ? kSm80Costs
         : shares_multiprocessor(row, device)       ? kSharingCosts
         : row.config.warps == kWarpsOfTwoConsumers ? kTwoConsumerCosts
                                                    : kThreeConsumerCosts;
}

bool may_keep_sums(KernelRow const& row) {
  return row.key.arch == Arch::Sm90 && row.key.direction == Direction::Backward &&
         row.key.head_dim > 128;
}

// How many tiles of keys a tile of queries visits, queries [first, last].
int64_t visited_tiles(Problem const& problem, int64_t first, int64_t last, int64_t tile_n) {
  // The masks are aligned at the bottom right: query i stands at key i + diagonal.
  int64_t const diagonal = int64_t{problem.seqlen_k} - problem.seqlen_q;
  int64_t const first_key = std::max<int64_t>(0, first + diagonal - problem.window_left);
  int64_t const last_key =
      std::min<int64_t>(problem.seqlen_k - 1, last + diagonal + problem.window_right);
  return last_key < first_key ? 0 : last_key / tile_n - first_key / tile_n + 1;
}

// The clocks of an SM for one head, of a row that may_keep_sums(). Without sums the kernel for dK
// and dV goes in steps of 64 queries and 64 keys, with sums in steps of 64 and 128.
double grad_clocks(KernelRow const& row, Problem const& problem, DeviceInfo const& device) {
  KernelConfig step = row.config;
  step.tile_m = kWarpgroupQueries;
  TileWork const work = tile_work(problem, step);
  double const clocks =
      double(work.tiles) * tile_clocks(row, device) * step.tile_m / row.config.tile_m;
  return row.config.tile_n > kKeysWithoutSums
             ? clocks * kShareWithSums + kClocksOfSummedQuery * double(work.ctas) * step.tile_m
             : clocks;
}

}  // namespace

TileWork tile_work(Problem const& problem, KernelConfig const& config) {
  TileWork work{ceil_div(problem.seqlen_q, config.tile_m), 0, 0};
  for (int64_t first = 0; first < problem.seqlen_q; first += config.tile_m) {
    int64_t const last = std::min<int64_t>(first + config.tile_m, problem.seqlen_q) - 1;
    int64_t const tiles = visited_tiles(problem, first, last, config.tile_n);
    work.tiles += tiles;
    work.longest = std::max(work.longest, tiles);
  }
  return work;
}

double warpgroup_tiles(Problem const& problem, KernelConfig const& config) {
  double sum = 0;
  for (int64_t begin = 0; begin < problem.seqlen_q; begin += config.tile_m) {
    int64_t longest = 0;
    for (int64_t first = begin; first < begin + config.tile_m; first += kWarpgroupQueries) {
      if (first >= problem.seqlen_q) {
        sum += kIdleShare * double(longest);
        continue;
      }
      int64_t const last = std::min<int64_t>(first + kWarpgroupQueries, problem.seqlen_q) - 1;
      int64_t const tiles = visited_tiles(problem, first, last, config.tile_n);
      longest = std::max(longest, tiles);
      sum += double(tiles);
    }
  }
  return sum * kWarpgroupQueries / config.tile_m /
         double(ceil_div(problem.seqlen_q, config.tile_m));
}

double tile_clocks(KernelRow const& row, DeviceInfo const& device) {
  double const scores = double(row.config.tile_m) * row.config.tile_n;
  // A score is q.k, and with qv also qv.v.
  int32_t const depth = row.key.head_dim + (has_qv(row.key.score_mods) ? row.key.head_dim_v : 0);
  double const flops = 2 * scores * (double(depth) + row.key.head_dim_v);
  RowCosts const& costs = costs_of(row, device);
  return std::max(flops / flops_per_clock(row.key.arch, device.compute_capability),
                  scores / kExpsPerClock) /
             costs.efficiency +
         costs.tile_clocks;
}

int64_t resident_ctas(KernelRow const& row, DeviceInfo const& device) {
  int32_t const fit_shared_memory =
      device.shared_memory_per_multiprocessor / (row.shared_memory_bytes + kReservedSharedMemory);
  int32_t const fit = std::min(fit_shared_memory, 1536 / row.threads);
  if (row.key.direction != Direction::Forward) return std::max<int32_t>(1, fit);
  if (row.key.arch == Arch::Sm90) {
    int32_t const consumers = std::max(1, row.threads / kWarpgroupThreads - 1);
    return std::max<int32_t>(1, std::min(fit, kConsumersOfSm / consumers));
  }
  KernelConfig config = row.config;
  config.warps = std::max<int32_t>(1, row.threads / 32);  // all warps of these kernels compute
  int32_t const fit_registers =
      resident_warps(row.key, config, row.shared_memory_bytes) / config.warps;
  return std::max<int32_t>(1, std::min(fit, fit_registers));
}

double grid_us(KernelRow const& row, DeviceInfo const& device, GridWork const& work) {
  int64_t const resident = resident_ctas(row, device);
  int64_t const per_multiprocessor = ceil_div(work.ctas, device.multiprocessors);
  double const busy_warps = double(std::min(resident, per_multiprocessor)) * row.threads / 32;
  double const speed = std::min(1.0, busy_warps / kSaturatingWarps);  // 1: the full speed of an SM

  // The CTAs of an SM share its tensor cores, so the time of the SM is the sum of theirs. No
  // schedule takes less time than the CTA with the most key tiles takes.
  double const longest_tile = shares_multiprocessor(row, device)
                                  ? std::max(work.tile_clocks, kTileClocksAlone)
                                  : work.tile_clocks;
  double const clocks = std::max(double(per_multiprocessor) * work.mean_tiles * work.tile_clocks,
                                 work.longest * longest_tile);
  double const rounds = double(ceil_div(work.ctas, device.multiprocessors * resident));
  return (clocks / speed + rounds * costs_of(row, device).cta_clocks) / kClocksPerUs;
}

double estimate_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device) {
  TileWork const work = tile_work(problem, row.config);
  int64_t const heads = int64_t{problem.heads} * problem.batch;
  int64_t const ctas = work.ctas * heads;
  if (ctas == 0) return 0;
  if (may_keep_sums(row)) {  // whose grids are persistent: all SMs end at about the same time
    double const clocks = double(heads) * grad_clocks(row, problem, device);
    return kLaunchUs + clocks / (device.multiprocessors * kClocksPerUs);
  }
  double const mean = row.key.arch == Arch::Sm90 && row.config.tile_m > kWarpgroupQueries
                          ? warpgroup_tiles(problem, row.config)
                          : work.mean();
  return kLaunchUs +
         grid_us(row, device, {ctas, mean, double(work.longest), tile_clocks(row, device)});
}

double estimate_us(CostQuestion const& question, Problem const& problem) {
  KernelConfig const& config = question.config;
  for (int32_t const number :
       {question.head_dim, question.head_dim_v, config.tile_m, config.tile_n, question.threads,
        question.shared_memory_bytes, question.multiprocessors,
        question.shared_memory_per_multiprocessor}) {
    if (number <= 0) throw std::invalid_argument("question: every number must be positive");
  }
  KernelRow row{};
  row.key.arch = question.arch;
  row.key.head_dim = question.head_dim;
  row.key.head_dim_v = question.head_dim_v;
  row.config = config;
  row.threads = question.threads;
  row.shared_memory_bytes = question.shared_memory_bytes;
  DeviceInfo device{};
  device.compute_capability = question.compute_capability;
  device.multiprocessors = question.multiprocessors;
  device.shared_memory_per_multiprocessor = question.shared_memory_per_multiprocessor;
  return estimate_us(row, problem, device);
}

}  // namespace cute_attention
