#include "cost_model.h"

#include <algorithm>
#include <stdexcept>

#include "cute_attention/core/resident_warps.h"

namespace cute_attention {
namespace {

// The share of the peak that a row's inner loop reaches, and the share that it reaches where three
// warpgroups compute.
constexpr double kEfficiency = 0.75;
constexpr double kEfficiencyOfThreeWarpgroups = 0.78;
constexpr double kExpsPerClock = 16;  // exponentials (MUFU results) that an SM computes in a clock
// What a CTA takes before and after its key tiles: it loads Q and the first K, and stores O.
constexpr double kCtaClocks = 2500;
// What a key tile takes in addition to its arithmetic: barriers and the maxima of rows.
constexpr double kTileClocks = 200;
// The same of sm90 rows of one consumer warpgroup, of which three CTAs share an SM: one computes
// while another waits in a barrier or for its first K. Fitted, with kEfficiency, to an H100.
constexpr double kCtaClocksOfOneConsumer = 4000;
constexpr double kTileClocksOfOneConsumer = 100;
// Alone on its SM such a CTA begins and ends sooner; but nobody else computes while its products
// and its softmax wait for each other, so that a key tile takes so long at least. Fitted likewise.
constexpr double kCtaClocksAlone = 2000;
constexpr double kTileClocksAlone = 800;
constexpr double kLaunchUs = 3;
constexpr int32_t kReservedSharedMemory = 1024;  // bytes of each CTA that CUDA keeps for itself
constexpr int32_t kWarpsOfOneConsumer = 8;       // a producer warpgroup and one that computes
constexpr int32_t kWarpsOfTwoConsumers = 12;     // the same and two that compute
constexpr int32_t kSaturatingWarps = 8;  // so many warps keep the tensor cores of an SM busy

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

bool has_one_consumer(KernelRow const& row) {
  return row.key.arch == Arch::Sm90 && row.config.warps == kWarpsOfOneConsumer;
}

}  // namespace

TileWork tile_work(Problem const& problem, KernelConfig const& config) {
  // The masks are aligned at the bottom right: query i stands at key i + diagonal.
  int64_t const diagonal = int64_t{problem.seqlen_k} - problem.seqlen_q;
  TileWork work{ceil_div(problem.seqlen_q, config.tile_m), 0, 0};
  for (int64_t m_block = 0; m_block < work.ctas; ++m_block) {
    int64_t const first_query = m_block * config.tile_m;
    int64_t const last_query = std::min<int64_t>(first_query + config.tile_m, problem.seqlen_q) - 1;
    int64_t const first_key = std::max<int64_t>(0, first_query + diagonal - problem.window_left);
    int64_t const last_key =
        std::min<int64_t>(problem.seqlen_k - 1, last_query + diagonal + problem.window_right);
    if (last_key < first_key) continue;
    int64_t const tiles = last_key / config.tile_n - first_key / config.tile_n + 1;
    work.tiles += tiles;
    work.longest = std::max(work.longest, tiles);
  }
  return work;
}

double tile_clocks(KernelRow const& row, DeviceInfo const& device) {
  double const scores = double(row.config.tile_m) * row.config.tile_n;
  // A score is q.k, and with qv also qv.v.
  int32_t const depth = row.key.head_dim + (has_qv(row.key.score_mods) ? row.key.head_dim_v : 0);
  double const flops = 2 * scores * (double(depth) + row.key.head_dim_v);
  return std::max(flops / flops_per_clock(row.key.arch, device.compute_capability),
                  scores / kExpsPerClock) /
             (row.config.warps > kWarpsOfTwoConsumers ? kEfficiencyOfThreeWarpgroups
                                                      : kEfficiency) +
         (has_one_consumer(row) ? kTileClocksOfOneConsumer : kTileClocks);
}

int64_t resident_ctas(KernelRow const& row, DeviceInfo const& device) {
  int32_t const fit_shared_memory =
      device.shared_memory_per_multiprocessor / (row.shared_memory_bytes + kReservedSharedMemory);
  int32_t const fit = std::min(fit_shared_memory, 1536 / row.threads);
  if (row.key.arch != Arch::Sm80 || row.key.direction != Direction::Forward) {
    return std::max<int32_t>(1, fit);
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
  bool const one_consumer = has_one_consumer(row);
  double const longest_tile =
      one_consumer ? std::max(work.tile_clocks, kTileClocksAlone) : work.tile_clocks;
  double const clocks = std::max(double(per_multiprocessor) * work.mean_tiles * work.tile_clocks,
                                 work.longest * longest_tile);
  double const rounds = double(ceil_div(work.ctas, device.multiprocessors * resident));
  double const cta_clocks = !one_consumer             ? kCtaClocks
                            : per_multiprocessor == 1 ? kCtaClocksAlone
                                                      : kCtaClocksOfOneConsumer;
  return (clocks / speed + rounds * cta_clocks) / kClocksPerUs;
}

double estimate_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device) {
  TileWork const work = tile_work(problem, row.config);
  int64_t const ctas = work.ctas * problem.heads * problem.batch;
  if (ctas == 0) return 0;
  return kLaunchUs + grid_us(row, device,
                             {ctas, double(work.tiles) / double(work.ctas), double(work.longest),
                              tile_clocks(row, device)});
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
