#include "split_choice.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "calls.h"
#include "cost_model.h"
#include "cute_attention/core/few_queries.h"
#include "cute_attention/core/group_queries.h"
#include "cute_attention/core/resident_warps.h"
#include "cute_attention/core/split_steps.h"

namespace cute_attention {
namespace {

constexpr int64_t kMostRounds = 4;  // of CTAs: what takes more is even enough without splits
constexpr int64_t kMostResident = kConsumersOfSm;  // CTAs of a forward row on an SM, of one each
constexpr double kGain = 0.95;  // of the time without splits: less is not worth the memory
constexpr int32_t kWarpgroupRows = 64;
// A key tile of sm90 takes so long at least, whatever its head dim: products and softmax of the one
// warpgroup that has queries wait for each other. 32k keys of one sequence, undivided, on an
// H200: 1.03 us a tile at head dim 64, 0.98 at 128, 0.96 at 256.
constexpr double kLeastTileClocks = 1500;
// The second kernel: until its first load is back, and its last store is seen. That of sm90 is
// launched early, but costs no less, since its code has to come from memory, too: 4k keys of one
// sequence in 16 splits of 8 KV heads took 25 us on an H200 where it combined 8 rows a tile, and 21
// where the last split combined 4. The last split of a tile, in its place: until it knows that it
// is the last.
constexpr double kCombineUs = 4;
constexpr double kLastSplitUs = 1.2;
constexpr double kCombineStepUs = 0.6;
// What the second kernel of sm90 takes longer where CTAs of the forward are on nearly all SMs,
// presumably since it cannot begin beside them. Of 64 heads over 8 it combines 12 and 16 splits, of
// 32 over 8 the last split does, which was faster by 1.7 us with 96 CTAs and by 3.4 with 128, in
// the mean of three lengths with L2 clean and dirty (H200, 132 SMs). Nothing was measured between.
constexpr double kLateCombineUs = 1.7;
constexpr double kFewestLate = 0.75;  // CTAs, of the SMs
// A further step of the second kernel, which has 64 splits in each: 128 splits of one tile took 3
// us longer than 64 at 32k and at 128k keys, though each had half of the keys.
constexpr double kSplitsOfKernelStep = 64;
constexpr double kKernelStepUs = 3;
// What it takes longer for each row, and for each byte that it reads of splits: those are mostly in
// L2. 8192 rows of 64 columns in 2, 8 and 16 splits took it 7.7, 9.2 and 15.5 us, of 128 columns
// 9.0, 12.2 and 23.1 (H200).
constexpr double kCombineRowUs = 2e-4;
constexpr double kSplitBytesPerUs = 5e6;
// Of rows whose CTAs share an SM. A key tile takes a CTA that is alone on its SM so many clocks for
// each of its keys: then nobody computes while it waits. CTAs that have many key tiles take less
// for each than the cost model says, which was fitted to short ones, and more before and after.
// Fitted with the two constants above to 18 shapes of head dim 64 in 13 numbers of splits on each
// of three rows (H200): the row and the number that are chosen take 1.011 times as long as the
// fastest of all, 1.055 at worst.
constexpr double kClocksOfKeyAlone = 15;
constexpr double kShareOfTileClocks = 0.83;
constexpr double kSharingCtaClocks = 2500;
// What an SM gets of the memory's bandwidth, in bytes a clock, where all of them read: an H200
// reads 4.2 TB/s.
constexpr double kReadBytesPerClock = 21;
// What two things take together, as reading and computing, of which each alone takes as long as an
// argument says: the sixth root of the sum of sixth powers, so that the shorter adds little. The
// model is then within a tenth of an H200 for 32 heads over 8 of 128: 31 us of products alone, 64
// us of products and 62 us of reads that take 73, 16 us and 31 us that take 31. std::pow() would
// need glibc 2.29.
double overlapped(double a, double b) {
  double const longer = std::max(a, b), ratio = std::min(a, b) / longer;
  double const third_power = ratio * ratio * ratio;
  return longer * std::cbrt(std::sqrt(1 + third_power * third_power));
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Problem problem_of(KernelRow const& row, ForwardParams const& p) {
  return {row.key.direction, row.key.dtype, p.batch,    p.seqlen_q,   p.seqlen_k,
          p.heads,           p.heads_kv,    p.head_dim, p.head_dim_v, p.window_left,
          p.window_right,    p.softcap,     0,          kAnyRow};
}

// The call of a forward problem, as far as the choice of its splits reads it: of pointers it asks
// only whether there is one.
ForwardParams params_of(Problem const& p) {
  static int32_t const kNumber = 0;
  static uint64_t const kSeed = 0;
  ForwardParams params{};
  params.batch = p.batch;
  params.seqlen_q = p.seqlen_q;
  params.seqlen_k = p.seqlen_k;
  params.heads = p.heads;
  params.heads_kv = p.heads_kv;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.window_left = p.window_left;
  params.window_right = p.window_right;
  params.dropout.seed = (p.features & kDropout) != 0 ? &kSeed : nullptr;
  params.cache.seqused_k = (p.features & kCache) != 0 ? &kNumber : nullptr;
  if (p.total_q != kNotPacked) {
    params.cu_seqlens_q = &kNumber;
    params.total_q = p.total_q;
  }
  params.num_splits = p.num_splits;
  params.batch_invariant = p.batch_invariant;
  return with_a_grid(params);
}

// The call on the row, apart from how many splits there are.
struct SplitModel {
  KernelRow row;  // as the call has it
  DeviceInfo const& device;
  int64_t resident;  // CTAs of the row on an SM
  int64_t tiles;     // of queries
  double mean_keys;  // key tiles of a tile of queries
  double longest_keys;
  double clocks;     // of a key tile
  double read_us;    // until all keys and values are read
  double split_us;   // until one split of all rows is read again
  int64_t all_rows;  // of the call
  int32_t rows;      // of a warpgroup, which may combine the splits of its tile; 0: a kernel does
  int32_t head_dim_v;

  bool shares_sm() const { return row.key.arch == Arch::Sm90 && resident > 1; }

  double us(int64_t splits) const {
    double const mean = std::ceil(mean_keys / double(splits));
    double const longest = std::ceil(longest_keys / double(splits));
    GridWork const work{tiles * splits, mean, longest, clocks};
    double const compute =
        shares_sm() ? sharing_clocks(work) / kClocksPerUs : grid_us(row, device, work);
    double const both = overlapped(compute, read_us);
    return splits == 1 ? both : both + combine_us(int32_t(splits)) + double(splits) * split_us;
  }

  // The clocks of a launch whose CTAs share an SM.
  double sharing_clocks(GridWork const& work) const {
    int64_t const of_sm = ceil_div(work.ctas, device.multiprocessors);
    double const together = double(std::min(resident, of_sm));
    double const step = overlapped(kClocksOfKeyAlone * row.config.tile_n,
                                   together * kShareOfTileClocks * work.tile_clocks);
    double const rounds = double(ceil_div(work.ctas, device.multiprocessors * resident));
    return std::max(double(of_sm) / together * work.mean_tiles, work.longest) * step +
           rounds * kSharingCtaClocks;
  }

  double combine_us(int32_t splits) const {
    if (rows > 0 && last_split_combines(rows, splits, head_dim_v)) {
      return kLastSplitUs + kCombineStepUs * double(combine_steps(rows, splits, head_dim_v));
    }
    // A step has up to eight splits of each member of a team (combine_splits.cu).
    bool const late =
        row.key.arch == Arch::Sm90 && double(tiles * splits) > kFewestLate * device.multiprocessors;
    return kCombineUs + (late ? kLateCombineUs : 0) + kCombineRowUs * double(all_rows) +
           kKernelStepUs * (std::ceil(splits / kSplitsOfKernelStep) - 1);
  }
};

// The row as a call has it: with few queries by a kernel with smaller tiles.
KernelRow row_for(KernelRow row, ForwardParams const& p) {
  if (has_few_queries_kernel(row.key, row.config) &&
      takes_few_queries_kernel(with_groups_as_queries(p))) {
    KernelConfig const config = few_queries_config(row.config);
    // O takes the place of Q.
    row.shared_memory_bytes -=
        2 * (row.config.tile_m - config.tile_m) * std::max(row.key.head_dim, row.key.head_dim_v);
    row.threads = 32 * config.warps;
    row.config = config;
  }
  return row;
}

SplitModel model_of(KernelRow const& asked, ForwardParams const& p, DeviceInfo const& device) {
  KernelRow const row = row_for(asked, p);
  ForwardGrid const grid = row.grid(&p);
  KernelConfig config = row.config;
  config.tile_m = grid.queries;
  TileWork const work = tile_work(problem_of(row, p), config);
  int64_t const resident = resident_ctas(row, device);
  double clocks = tile_clocks(row, device);
  int64_t const rows = grid.tiles > 0 ? ceil_div(lse_size(p), grid.tiles) : 0;
  // A warpgroup of sm90 that has no queries does not compute: in the only tile of a head, or of
  // several heads.
  if (row.key.arch == Arch::Sm90 && grid.tiles > 0) {
    int64_t const used =
        std::min<int64_t>(ceil_div(rows, kWarpgroupRows) * kWarpgroupRows, row.config.tile_m);
    if (work.ctas == 1) clocks *= double(used) / row.config.tile_m;
    // Where CTAs share an SM, others compute meanwhile.
    if (resident == 1) clocks = std::max(clocks, kLeastTileClocks);
  }
  // A window may hide keys from all queries.
  double const keys = std::min(double(p.seqlen_k), double(work.tiles) * row.config.tile_n);
  double const read_bytes = 2. * p.batch * p.heads_kv * keys * (double(p.head_dim) + p.head_dim_v);
  return {row,
          device,
          resident,
          grid.tiles,
          double(work.tiles) / double(std::max<int64_t>(work.ctas, 1)),
          double(work.longest),
          clocks,
          read_bytes / (kReadBytesPerClock * kClocksPerUs * device.multiprocessors),
          sizeof(float) * double(split_workspace_size(p, 1)) / kSplitBytesPerUs,
          lse_size(p),
          last_split_may_combine(row.key, p) ? int32_t(std::min<int64_t>(rows, kWarpgroupRows)) : 0,
          p.head_dim_v};
}

struct SplitTime {
  int32_t splits;
  double us;
};

SplitTime best_of(SplitModel const& model, DeviceInfo const& device) {
  int64_t const slots = device.multiprocessors * model.resident;
  SplitTime best{1, model.us(1)};
  if (model.tiles < 1 || model.tiles >= kMostRounds * slots) return best;
  best.us *= kGain;
  // Half a round, three quarters, one round, and so on: half of the SMs read nearly as fast as all
  // of them. At 24 points of decoding on an H200 the chosen number took 1.007 of the time of the
  // best of eleven numbers in the mean, 1.05 at worst; where L2 was dirty, 1.002 and 1.03.
  for (int64_t quarters : {2, 3, 4, 8, 12, 16}) {
    int64_t splits = std::min(
        {quarters * slots / (4 * model.tiles), int64_t(model.longest_keys), int64_t(kMostSplits)});
    if (splits < 2) continue;
    // No more than it takes to make the longest split as short.
    int64_t const longest = ceil_div(int64_t(model.longest_keys), splits);
    splits = ceil_div(int64_t(model.longest_keys), longest);
    double const us = model.us(splits);
    if (us < best.us) best = {int32_t(splits), us};
  }
  return best;
}

// By the call, or else by the environment; 0: by neither.
int32_t asked_splits(ForwardParams const& p) {
  return p.num_splits > 0 ? p.num_splits : splits_of_environment();
}

// A grid has one CTA for each split of each tile.
int32_t within_grid(KernelRow const& row, ForwardParams const& p, int32_t splits) {
  int64_t const tiles = tile_count(p.seqlen_q, row.config.tile_m, p.heads, p.batch);
  return int32_t(
      std::max<int64_t>(1, std::min<int64_t>(splits, kMaxTiles / std::max<int64_t>(tiles, 1))));
}

}  // namespace

int32_t best_splits(KernelRow const& row, ForwardParams const& params, DeviceInfo const& device) {
  return best_of(model_of(row, params, device), device).splits;
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

bool may_choose_splits(ForwardParams const& params, DeviceInfo const& device) {
  int64_t const rows = lse_size(params);
  bool const none = params.seqlen_k == 0 || params.heads_kv == 0 || rows == 0;
  if (none || rows > kMostSplitRows || params.batch_invariant != 0) return false;
  int32_t const asked = asked_splits(params);
  return asked > 1 || (asked == 0 && may_be_split(params, device));
}

int32_t choose_splits(KernelRow const& row, ForwardParams const& params, DeviceInfo const& device) {
  if (row.grid == nullptr || !may_choose_splits(params, device)) return 1;
  int32_t const asked = asked_splits(params);
  return within_grid(row, params, asked > 0 ? asked : best_splits(row, params, device));
}

int32_t choose_splits(KernelRow const& row, Problem const& problem, DeviceInfo const& device) {
  bool const forward = problem.direction == Direction::Forward;
  return forward ? choose_splits(row, params_of(problem), device) : 1;
}

double call_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device) {
  if (row.grid != nullptr && problem.direction == Direction::Forward) {
    ForwardParams const params = params_of(problem);
    if (may_choose_splits(params, device)) {
      SplitModel const model = model_of(row, params, device);
      int32_t const asked = asked_splits(params);
      SplitTime const found =
          asked > 0 ? SplitTime{asked, model.us(asked)} : best_of(model, device);
      if (found.splits > 1) return kLaunchUs + found.us;
    }
  }
  return estimate_us(row, problem, device);
}

}  // namespace cute_attention
