#include "dispatch.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "cost_model.h"

namespace cute_attention {
namespace {

constexpr size_t kRemembered = 4096;  // problems; decoding asks with a new length at each step
constexpr size_t kNearest = 6;        // rows that a miss describes

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

// What kernels count in 32 bits: positions in a sequence, and tiles.
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

void refuse_size(KernelRow const& row, Problem const& p, std::vector<std::string>* reasons) {
  refuse_length("seqlen_q", p.seqlen_q, reasons);
  refuse_length("seqlen_k", p.seqlen_k, reasons);
  refuse_grid("seqlen_q", p.seqlen_q, row.config.tile_m, p.heads, p.batch, reasons);
  if (row.key.direction == Direction::Backward) {  // its grid is one of keys
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
  for (std::string const& name : feature_names(features_of(key.score_mod) & ~asked)) {
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

std::vector<std::string> reasons_against(KernelRow const& row, Problem const& p,
                                         DeviceInfo const* device) {
  std::vector<std::string> reasons;
  if (p.direction != row.key.direction) {
    reasons.push_back(std::string("it computes the ") + direction_name(row.key.direction) +
                      " pass");
  }
  if (p.dtype != row.key.dtype) {
    reasons.push_back(std::string("dtype is not the row's ") + dtype_name(row.key.dtype));
  }
  refuse_head_dim("head_dim", p.head_dim, row.key.head_dim, &reasons);
  refuse_head_dim("head_dim_v", p.head_dim_v, row.key.head_dim_v, &reasons);
  refuse_size(row, p, &reasons);
  refuse_features(row.key, asked_features(p), &reasons);
  refuse_device(row, device, &reasons);
  return reasons;
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
  std::vector<Candidate> all = candidates(problem, &device);
  all.erase(std::remove_if(all.begin(), all.end(),
                           [&](Candidate const& c) {
                             return arch != kAnyArch &&
                                    static_cast<int32_t>(c.row->row->key.arch) != arch;
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

// The row made for the head dims, or the next larger one; then the fastest. The cost model is about
// forward passes: of backward rows it is the one with the largest tiles that shared memory holds.
std::tuple<int32_t, int32_t, int32_t, double> rank(Candidate const& candidate) {
  KernelRow const& row = *candidate.row->row;
  bool const backward = row.key.direction == Direction::Backward;
  return {row.key.head_dim, row.key.head_dim_v, backward ? -row.shared_memory_bytes : 0,
          candidate.estimate_us};
}

struct Question {
  Problem problem;
  int32_t arch;
  int32_t device;
  bool operator==(Question const& other) const {
    return std::memcmp(this, &other, sizeof(*this)) == 0;
  }
};
static_assert(std::has_unique_object_representations_v<decltype(Question::arch)> &&
                  sizeof(Question) == 15 * sizeof(int32_t),
              "a Question is compared and hashed as bytes: no padding");

struct QuestionHash {
  size_t operator()(Question const& question) const {
    uint32_t words[sizeof(Question) / sizeof(uint32_t)];
    std::memcpy(words, &question, sizeof(words));
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a word at a time
    for (uint32_t const word : words) hash = (hash ^ word) * 0x100000001b3;
    return hash ^ (hash >> 32);
  }
};

}  // namespace

std::vector<Candidate> candidates(Problem const& problem, DeviceInfo const* device) {
  std::vector<Candidate> all;
  for (LoadedRow const& loaded : kernel_libraries().rows) {
    Candidate candidate{&loaded, reasons_against(*loaded.row, problem, device),
                        std::numeric_limits<double>::infinity(), false};
    if (candidate.reasons.empty())
      candidate.estimate_us = estimate_us(*loaded.row, problem, *device);
    all.push_back(std::move(candidate));
  }
  for (Candidate& candidate : all) {
    auto const beats = [&](Candidate const& other) {
      return other.reasons.empty() && other.row->row->key.arch == candidate.row->row->key.arch &&
             (rank(other) < rank(candidate) || (other.chosen && rank(other) == rank(candidate)));
    };
    candidate.chosen = candidate.reasons.empty() && std::none_of(all.begin(), all.end(), beats);
  }
  return all;
}

LoadedRow const& find_row(Problem const& problem, int32_t arch, DeviceInfo const& device) {
  static std::mutex mutex;
  static std::unordered_map<Question, LoadedRow const*, QuestionHash> answers;
  Question const question{problem, arch, device.ordinal};
  {
    std::lock_guard<std::mutex> const lock(mutex);
    auto const answer = answers.find(question);
    if (answer != answers.end()) return *answer->second;
  }
  Candidate const* best = nullptr;
  std::vector<Candidate> const all = candidates(problem, &device);
  for (Candidate const& candidate : all) {
    bool const asked =
        arch == kAnyArch || static_cast<int32_t>(candidate.row->row->key.arch) == arch;
    if (!asked || !candidate.chosen) continue;
    if (best == nullptr || candidate.estimate_us < best->estimate_us) best = &candidate;
  }
  if (best == nullptr) throw std::runtime_error(miss_message(problem, arch, device));
  std::lock_guard<std::mutex> const lock(mutex);
  if (answers.size() >= kRemembered) answers.clear();
  answers.emplace(question, best->row);
  return *best->row;
}

std::vector<std::string> feature_names(uint32_t features) {
  struct {
    Feature feature;
    char const* name;
  } const all[] = {{kBias, "bias"},
                   {kAlibi, "alibi_slopes"},
                   {kSink, "sink"},
                   {kDropout, "dropout"},
                   {kNonPositiveScale, "a scale that is not positive"},
                   {kSoftcap, "softcap"}};
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

char const* score_mod_name(ScoreMod mod) { return mod == ScoreMod::Softcap ? "softcap" : "none"; }

}  // namespace cute_attention
