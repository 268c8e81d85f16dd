#include "split_choice.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cost_model.h"

namespace cute_attention {
namespace {

constexpr int64_t kMostRounds = 4;    // of CTAs: what takes more is even enough without splits
constexpr int64_t kMostResident = 3;  // CTAs of a forward row that an SM runs at the same time
constexpr double kGain = 0.9;         // of the time without splits: less is not worth the memory
constexpr int32_t kWarpgroupRows = 64;
// The second kernel: until its first load is back, and its last store is seen.
constexpr double kCombineUs = 3;
// What splits write, and the second kernel reads, is mostly in L2. Bytes a microsecond.
constexpr double kSplitBytesPerUs = 3e6;
// What an SM gets of the memory's bandwidth, in bytes a clock, where all of them read.
constexpr double kReadBytesPerClock = 16;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Problem problem_of(KernelRow const& row, ForwardParams const& p) {
  return {row.key.direction, row.key.dtype, p.batch,    p.seqlen_q,   p.seqlen_k,
          p.heads,           p.heads_kv,    p.head_dim, p.head_dim_v, p.window_left,
          p.window_right,    p.softcap,     0,          kAnyRow};
}

// The call on the row, apart from how many splits there are.
struct SplitModel {
  KernelRow const& row;
  DeviceInfo const& device;
  int64_t tiles;     // of queries
  double mean_keys;  // key tiles of a tile of queries
  double longest_keys;
  double clocks;    // of a key tile
  double read_us;   // until all keys and values are read
  double split_us;  // until one split of all rows is written and read again

  double us(int64_t splits) const {
    double const mean = std::ceil(mean_keys / double(splits));
    double const longest = std::ceil(longest_keys / double(splits));
    double const compute = grid_us(row, device, {tiles * splits, mean, longest, clocks});
    // The two do not overlap perfectly: the less one of them takes, the less it adds.
    double const both = std::hypot(compute, read_us);
    return splits == 1 ? both : both + kCombineUs + double(splits) * split_us;
  }
};

SplitModel model_of(KernelRow const& row, ForwardParams const& p, DeviceInfo const& device) {
  ForwardGrid const grid = row.grid(&p);
  KernelConfig config = row.config;
  config.tile_m = grid.queries;
  TileWork const work = tile_work(problem_of(row, p), config);
  double clocks = tile_clocks(row, device);
  // A warpgroup of sm90 that has no queries does not compute.
  if (row.key.arch == Arch::Sm90 && grid.tiles > 0) {
    int64_t const rows = ceil_div(lse_size(p), grid.tiles);
    int64_t const used =
        std::min<int64_t>(ceil_div(rows, kWarpgroupRows) * kWarpgroupRows, row.config.tile_m);
    clocks *= double(used) / row.config.tile_m;
  }
  double const read_bytes =
      2. * p.batch * p.heads_kv * p.seqlen_k * (double(p.head_dim) + p.head_dim_v);
  return {row,
          device,
          grid.tiles,
          double(work.tiles) / double(std::max<int64_t>(work.ctas, 1)),
          double(work.longest),
          clocks,
          read_bytes / (kReadBytesPerClock * kClocksPerUs * device.multiprocessors),
          8. * double(split_workspace_size(p, 1)) / kSplitBytesPerUs};
}

// A grid has one CTA for each split of each tile.
int32_t within_grid(KernelRow const& row, ForwardParams const& p, int32_t splits) {
  int64_t const tiles = tile_count(p.seqlen_q, row.config.tile_m, p.heads, p.batch);
  return int32_t(
      std::max<int64_t>(1, std::min<int64_t>(splits, kMaxTiles / std::max<int64_t>(tiles, 1))));
}

}  // namespace

int32_t best_splits(KernelRow const& row, ForwardParams const& params, DeviceInfo const& device) {
  SplitModel const model = model_of(row, params, device);
  int64_t const slots = device.multiprocessors * resident_ctas(row, device);
  if (model.tiles < 1 || model.tiles >= kMostRounds * slots) return 1;
  int64_t best = 1;
  double least = kGain * model.us(1);
  for (int64_t round = 1; round <= kMostRounds; ++round) {
    int64_t splits =
        std::min({round * slots / model.tiles, int64_t(model.longest_keys), int64_t(kMostSplits)});
    if (splits < 2) continue;
    // No more than it takes to make the longest split as short.
    int64_t const longest = ceil_div(int64_t(model.longest_keys), splits);
    splits = ceil_div(int64_t(model.longest_keys), longest);
    double const us = model.us(splits);
    if (us < least) {
      best = splits;
      least = us;
    }
  }
  return int32_t(best);
}

bool may_be_split(ForwardParams const& p, DeviceInfo const& device) {
  // All rows of a group of heads may share tiles, and no tile is larger than kMaxTile.
  int64_t const group = p.heads / p.heads_kv;
  int64_t const rows = std::min<int64_t>(
      group * (p.cu_seqlens_q == nullptr ? p.seqlen_q : p.total_q / std::max(p.batch, 1)),
      kMaxSeqlen);
  int64_t const fewest = tile_count(int32_t(rows), kMaxTile, p.heads_kv, p.batch);
  return p.seqlen_k > 1 && fewest < kMostRounds * kMostResident * device.multiprocessors;
}

int32_t splits_of_environment() {
  char const* const text = std::getenv("CUTE_ATTENTION_SPLITS");
  if (text == nullptr || *text == '\0') return 0;
  char* end = nullptr;
  long const splits = std::strtol(text, &end, 10);
  if (*end != '\0' || splits < 1 || splits > kMostSplits) {
    throw std::invalid_argument("CUTE_ATTENTION_SPLITS is '" + std::string(text) +
                                "', expected 1 to " + std::to_string(kMostSplits));
  }
  return int32_t(splits);
}

int32_t choose_splits(KernelRow const& row, ForwardParams const& params, DeviceInfo const& device) {
  int64_t const rows = lse_size(params);
  bool const none = params.seqlen_k == 0 || params.heads_kv == 0 || rows == 0;
  if (row.grid == nullptr || none || rows > kMostSplitRows) return 1;
  int32_t const asked = params.num_splits > 0 ? params.num_splits : splits_of_environment();
  return within_grid(row, params, asked > 0 ? asked : best_splits(row, params, device));
}

}  // namespace cute_attention
