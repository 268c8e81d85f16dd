// dispatch.cpp: why a row does not serve a problem, and which of those that do is chosen.
#include "dispatch.h"

#include <algorithm>
#include <bitset>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "cost_model.h"
#include "split_choice.h"

namespace cute_attention {
namespace {

constexpr Arch kArchs[] = {Arch::Sm80, Arch::Sm90};
constexpr size_t kNearest = 6;  // rows that the message of a miss describes

using Rows = std::vector<LoadedRow const*>;

std::string number(int64_t value) { return std::to_string(value); }

std::string capability_text(int32_t capability) {
  return number(capability / 10) + "." + number(capability % 10);
}

void refuse_head_dim(char const* name, int32_t asked, int32_t row,
                     std::vector<std::string>* reasons) {
  if (asked > row) {
    reasons->push_back(std::string(name) + " " + number(asked) + " is above the row's " +
                       number(row));
  } else if (asked % 8 != 0) {
    reasons->push_back(std::string(name) + " " + number(asked) + " is not a multiple of 8");
  }
}

// Kernels count the positions of a sequence in 32 bits, and tiles too.
void refuse_length(char const* name, int32_t seqlen, std::vector<std::string>* reasons) {
  if (seqlen > kMaxSeqlen) {
    reasons->push_back(std::string(name) + " " + number(seqlen) + " is above " +
                       number(kMaxSeqlen));
  }
}

void refuse_grid(char const* name, int32_t seqlen, int32_t tile, int32_t heads, int32_t batch,
                 std::vector<std::string>* reasons) {
  if (tile_count(seqlen, tile, heads, batch) > kMaxTiles) {
    reasons->push_back("batch " + number(batch) + " x heads " + number(heads) + " x " + name + " " +
                       number(seqlen) + " in tiles of " + number(tile) + " is above " +
                       number(kMaxTiles) + " tiles");
  }
}

// The part of a problem that differs between calls of one kind. Where nothing is refused, nothing
// is allocated.
void refuse_sizes(KernelRow const& row, Problem const& p, std::vector<std::string>* reasons) {
  refuse_length("seqlen_q", p.seqlen_q, reasons);
  refuse_length("seqlen_k", p.seqlen_k, reasons);
  refuse_grid("seqlen_q", p.seqlen_q, row.config.tile_m, p.heads, p.batch, reasons);
  if (row.key.direction == Direction::Backward) {  // its CTAs have a tile of keys each
    refuse_grid("seqlen_k", p.seqlen_k, row.config.tile_n, p.heads_kv, p.batch, reasons);
  }
}

uint32_t asked_features(Problem const& p) {
  return p.features | (p.softcap != 0 ? uint32_t(kSoftcap) : 0);
}

void refuse_features(KernelKey const& key, uint32_t asked, std::vector<std::string>* reasons) {
  for (std::string const& name : feature_names(asked & ~key.features)) {
    reasons->push_back("it does not serve " + name);
  }
  for (std::string const& name : feature_names(required_features(key.score_mods) & ~asked)) {
    reasons->push_back("it serves only calls with " + name);
  }
}

void refuse_device(KernelRow const& row, DeviceInfo const* device,
                   std::vector<std::string>* reasons) {
  if (device == nullptr) {
    reasons->push_back("the tensors are not on a CUDA device");
    return;
  }
  int32_t const capability = device->compute_capability;
  if (row.key.arch == Arch::Sm90 && capability != 90) {
    reasons->push_back("it runs on compute capability 9.0 alone, the device has " +
                       capability_text(capability));
  }
  if (row.key.arch == Arch::Sm80 && capability < 80) {
    reasons->push_back("it needs compute capability 8.0 or newer, the device has " +
                       capability_text(capability));
  }
  if (row.shared_memory_bytes > device->shared_memory_per_block) {
    reasons->push_back("it needs " + number(row.shared_memory_bytes) +
                       " bytes of shared memory, the device has " +
                       number(device->shared_memory_per_block));
  }
}

// Whether the call asks for a row, for this one or for another.
void refuse_request(LoadedRow const& loaded, Problem const& p, std::vector<std::string>* reasons) {
  if (p.row == kAnyRow && loaded.on_request) {
    reasons->push_back("it serves only calls that ask for it");
  } else if (p.row != kAnyRow && p.row != loaded.number) {
    LoadedRow const* const asked = row_of_number(p.row);
    reasons->push_back(std::string("the call asks for ") +
                       (asked == nullptr ? "a row that is not loaded" : asked->row->name));
  }
}

// Everything but the sizes.
void refuse_kind(LoadedRow const& loaded, Problem const& p, DeviceInfo const* device,
                 std::vector<std::string>* reasons) {
  KernelRow const& row = *loaded.row;
  refuse_request(loaded, p, reasons);
  if (p.direction != row.key.direction) {
    reasons->push_back(std::string("it computes the ") + direction_name(row.key.direction) +
                       " pass");
  }
  if (p.dtype != row.key.dtype) {
    reasons->push_back(std::string("dtype is not the row's ") + dtype_name(row.key.dtype));
  }
  refuse_head_dim("head_dim", p.head_dim, row.key.head_dim, reasons);
  refuse_head_dim("head_dim_v", p.head_dim_v, row.key.head_dim_v, reasons);
  refuse_features(row.key, asked_features(p), reasons);
  refuse_device(row, device, reasons);
}

std::string bound_text(int32_t bound) { return bound == kUnbounded ? "None" : number(bound); }

std::string describe(Problem const& p, DeviceInfo const& device) {
  return std::string(direction_name(p.direction)) + ", " + dtype_name(p.dtype) + ", batch " +
         number(p.batch) + ", seqlen " + number(p.seqlen_q) + " x " + number(p.seqlen_k) +
         ", heads " + number(p.heads) + " over " + number(p.heads_kv) + ", head_dim " +
         number(p.head_dim) + ", head_dim_v " + number(p.head_dim_v) + ", window (" +
         bound_text(p.window_left) + ", " + bound_text(p.window_right) + "), softcap " +
         std::to_string(p.softcap) + ", on " + device.name + " (compute capability " +
         capability_text(device.compute_capability) + ")";
}

std::string miss_message(Problem const& problem, int32_t arch, DeviceInfo const& device) {
  std::string const family =
      arch == kAnyArch ? "" : std::string(arch_name(static_cast<Arch>(arch))) + " ";
  std::string message = "no " + family + "kernel serves " + describe(problem, device);
  LoadedRow const* const asked = row_of_number(problem.row);
  if (asked != nullptr) {
    message = std::string("the kernel ") + asked->row->name + " does not serve " +
              describe(problem, device);
  }
  std::vector<Candidate> all = candidates(problem, &device);
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](Candidate const& c) {
                             if (asked != nullptr) return c.row->number != problem.row;
                             return c.row->on_request ||
                                    (arch != kAnyArch &&
                                     static_cast<int32_t>(c.row->row->key.arch) != arch);
                           }),
            all.end());
  if (all.empty()) return message + ": no " + family + "kernel library is loaded";
  std::stable_sort(all.begin(), all.end(), [](Candidate const& a, Candidate const& b) {
    return a.reasons.size() < b.reasons.size();
  });
  for (size_t i = 0; i < std::min(all.size(), kNearest); ++i) {
    message += "\n  " + std::string(all[i].row->row->name) + ": ";
    for (size_t j = 0; j < all[i].reasons.size(); ++j)
      message += (j == 0 ? "" : "; ") + all[i].reasons[j];
  }
  return message;
}

// How far a row is from the row that would fit a problem best; the row with the smallest distance
// is chosen. A row that can do nothing to scores but what is asked is nearest, whatever its head
// dims. Then smaller head dims are nearer: the row is known to have room for the problem's. Of
// backward rows of sm80 with equal head dims, the one with the most shared memory is nearest, since
// it has the largest tiles; the others are told apart by the cost model.
std::tuple<size_t, int32_t, int32_t, int32_t> distance(LoadedRow const& loaded,
                                                       Problem const& problem) {
  KernelRow const& row = *loaded.row;
  std::bitset<32> const unasked = row.key.score_mods & ~asked_features(problem);
  bool const by_tiles = row.key.direction == Direction::Backward && row.key.arch == Arch::Sm80;
  return {unasked.count(), row.key.head_dim, row.key.head_dim_v,
          by_tiles ? -row.shared_memory_bytes : 0};
}

Rows rows_for_kind(Problem const& problem, Arch arch, DeviceInfo const& device) {
  Rows rows;
  for (LoadedRow const& loaded : kernel_libraries().rows) {
    std::vector<std::string> reasons;
    refuse_kind(loaded, problem, &device, &reasons);
    if (loaded.row->key.arch == arch && reasons.empty()) rows.push_back(&loaded);
  }
  std::stable_sort(rows.begin(), rows.end(), [&](LoadedRow const* a, LoadedRow const* b) {
    return distance(*a, problem) < distance(*b, problem);
  });
  return rows;
}

// The rows of one architecture that serve all of a problem but perhaps its sizes, by distance;
// those that are equally distant, in the order in which they were loaded. They are remembered,
// since sizes differ from call to call: decoding has another seqlen_k at each step.
Rows const& remembered_rows(Problem const& p, Arch arch, DeviceInfo const& device) {
  using Kind =
      std::tuple<Arch, int32_t, Direction, DType, int32_t, int32_t, uint32_t, int32_t, size_t>;
  static std::mutex mutex;
  // Never erased, and not destroyed either: what is returned stays valid, and threads may run on
  // when the process ends.
  static auto& remembered = *new std::map<Kind, Rows>;
  static auto const& none = *new Rows;
  Kind const kind{arch,
                  device.ordinal,
                  p.direction,
                  p.dtype,
                  p.head_dim,
                  p.head_dim_v,
                  asked_features(p),
                  p.row,
                  kernel_libraries().rows.size()};  // the rows that are loaded only increase
  std::lock_guard<std::mutex> const lock(mutex);
  auto const found = remembered.find(kind);
  if (found != remembered.end()) return found->second;
  Rows rows = rows_for_kind(p, arch, device);
  // Kinds that no row serves are without number, and are not remembered.
  return rows.empty() ? none : remembered.emplace(kind, std::move(rows)).first->second;
}

// The row of a call whose bits do not depend on sizes is that for a prompt of so many tokens.
constexpr int32_t kInvariantSeqlen = 2048;

// The problem for which the row of a problem is chosen.
Problem deciding(Problem problem) {
  if (problem.batch_invariant != 0) {
    problem.batch = 1;
    problem.seqlen_q = problem.seqlen_k = kInvariantSeqlen;
  }
  return problem;
}

// What a row is expected to take; of rows that take the same, the one loaded first is smaller. With
// a cache without splits: a step of decoding has no time for more.
std::pair<double, int32_t> cost(LoadedRow const* row, Problem const& problem,
                                DeviceInfo const& device) {
  bool const cached = (problem.features & kCache) != 0;
  return {cached ? estimate_us(*row->row, problem, device) : call_us(*row->row, problem, device),
          row->number};
}

// The fastest of some rows, each of which is judged once.
LoadedRow const* fastest(Rows const& rows, Problem const& problem, DeviceInfo const& device) {
  LoadedRow const* best = nullptr;
  std::pair<double, int32_t> least;
  for (LoadedRow const* row : rows) {
    std::pair<double, int32_t> const asked = cost(row, problem, device);
    if (best == nullptr || asked < least) {
      best = row;
      least = asked;
    }
  }
  return best;
}

// The row of one architecture that is chosen for a problem that is deciding(): of those that serve
// it the least distant, and of those the fastest. Null where none serves it. The cost model is
// asked only where several rows are equally distant: it walks over the tiles. It knows nothing of
// pages and of queries of a few tokens, which memory bounds: calls with a cache get the row loaded
// first.
LoadedRow const* chosen_row(Problem const& problem, Arch arch, DeviceInfo const& device) {
  Rows equal;
  for (LoadedRow const* row : remembered_rows(problem, arch, device)) {
    if (!equal.empty() && distance(*row, problem) != distance(*equal[0], problem)) break;
    std::vector<std::string> reasons;
    refuse_sizes(*row->row, problem, &reasons);
    if (reasons.empty()) equal.push_back(row);
  }
  if (equal.empty()) return nullptr;
  return equal.size() == 1 || (problem.features & kCache) != 0 ? equal[0]
                                                               : fastest(equal, problem, device);
}

}  // namespace

std::vector<Candidate> candidates(Problem const& problem, DeviceInfo const* device) {
  std::vector<Candidate> all;
  for (LoadedRow const& loaded : kernel_libraries().rows) {
    Candidate candidate{&loaded, {}, std::numeric_limits<double>::infinity(), false};
    refuse_kind(loaded, problem, device, &candidate.reasons);
    refuse_sizes(*loaded.row, problem, &candidate.reasons);
    if (candidate.reasons.empty()) {
      candidate.estimate_us = call_us(*loaded.row, problem, *device);
      LoadedRow const* const chosen = chosen_row(deciding(problem), loaded.row->key.arch, *device);
      candidate.chosen = chosen != nullptr && chosen->number == loaded.number;
    }
    all.push_back(std::move(candidate));
  }
  return all;
}

LoadedRow const& find_row(Problem const& asked_for, int32_t arch, DeviceInfo const& device) {
  Problem const problem = deciding(asked_for);
  Rows of_archs;
  for (Arch const asked : kArchs) {
    if (arch != kAnyArch && arch != static_cast<int32_t>(asked)) continue;
    LoadedRow const* const row = chosen_row(problem, asked, device);
    if (row != nullptr) of_archs.push_back(row);
  }
  if (of_archs.empty()) throw std::runtime_error(miss_message(asked_for, arch, device));
  return of_archs.size() == 1 ? *of_archs[0] : *fastest(of_archs, problem, device);
}

LoadedRow const* row_of_number(int32_t number) {
  std::vector<LoadedRow> const& rows = kernel_libraries().rows;
  size_t const place = static_cast<size_t>(number) - kFirstRow;
  return number >= kFirstRow && place < rows.size() ? &rows[place] : nullptr;
}

LoadedRow const& row_of_name(std::string const& name) {
  for (LoadedRow const& loaded : kernel_libraries().rows) {
    if (name == loaded.row->name) return loaded;
  }
  throw std::invalid_argument("no kernel called '" + name + "' is loaded");
}

std::vector<std::string> feature_names(uint32_t features) {
  struct {
    Feature feature;
    char const* name;
  } const all[] = {{kBias, "bias"},
                   {kAlibi, "alibi_slopes"},
                   {kSink, "sink"},
                   {kDropout, "dropout"},
                   {kNonPositiveScale, "a scale that is not positive, or below 2^-126"},
                   {kSoftcap, "softcap"},
                   {kCache, "a cache"},
                   {kQv, "qv"}};
  std::vector<std::string> names;
  for (auto const& [feature, name] : all) {
    if (features & feature) names.push_back(name);
  }
  return names;
}

char const* arch_name(Arch arch) { return arch == Arch::Sm90 ? "sm90" : "sm80"; }
char const* direction_name(Direction direction) {
  return direction == Direction::Forward ? "forward" : "backward";
}

char const* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::Float16:
      return "fp16";
    case DType::BFloat16:
      return "bf16";
  }
  return "one that no kernel reads";
}

std::vector<std::string> score_mod_names(uint32_t score_mods) {
  std::vector<std::string> names;
  if (score_mods & score_mods::Softcap) names.push_back("softcap");
  if (score_mods & score_mods::Alibi) names.push_back("alibi");
  if (score_mods & score_mods::Bias) names.push_back("bias");
  if (score_mods & score_mods::Dropout) names.push_back("dropout");
  if (score_mods & score_mods::Qv) names.push_back("qv");
  return names;
}

}  // namespace cute_attention
