// config.h: what a kernel computes (KernelKey), how it computes it (KernelConfig), and how much
// shared memory a chip has for it.
#pragma once

#include <cstdint>

namespace cute_attention {

// A family of kernels: the instructions it is written with, not the chip it runs on.
enum class Arch : int32_t {
  Sm80 = 80,  // mma.sync, ldmatrix, cp.async: runs on compute capability 8.0 and newer
  Sm90 = 90,  // WGMMA, TMA, setmaxnreg (sm_90a): runs on compute capability 9.0 alone
};

enum class Direction : int32_t { Forward, Backward };

enum class DType : int32_t { Float16, BFloat16 };

// What a call may ask of a row beside its dtype and head dims: one bit each, or'ed together.
enum Feature : uint32_t {
  kBias = 1,
  kAlibi = 2,
  kSink = 4,
  kDropout = 8,
  kNonPositiveScale = 16,  // a row that takes the maximum before the scale cannot serve it
  kSoftcap = 32,
  kCache = 64,  // keys in a cache (KeyCache of params.h)
  kQv = 128,    // a second product that joins the score (ForwardParams::qv)
};

// What happens to a score after the scale and before the mask: a set of modifiers, or'ed together
// (core/score_mod.h). A modifier is named after the feature that it computes, and has its bit.
// Dropout, which acts on probabilities (core/kept_block.h), is one more, and so is Qv, which is a
// part of the score from the start (sm90/mla_traits.h).
namespace score_mods {
constexpr uint32_t None = 0;
constexpr uint32_t Softcap = kSoftcap;
constexpr uint32_t Alibi = kAlibi;
constexpr uint32_t Bias = kBias;
constexpr uint32_t Dropout = kDropout;
constexpr uint32_t Qv = kQv;
constexpr uint32_t Every = Softcap | Alibi | Bias | Dropout;
}  // namespace score_mods

// Whether the kernels of a row find in the arguments of a call which features of the row's set it
// has (core/call_features.h). All other kernels compute the whole set in every call.
constexpr bool serves_subsets(uint32_t set) { return set == score_mods::Every; }

// The features of a row's set without which it serves no call.
constexpr uint32_t required_features(uint32_t set) { return serves_subsets(set) ? 0 : set; }

// Whether the kernels of a row drop probabilities.
constexpr bool has_dropout(uint32_t set) { return (set & score_mods::Dropout) != 0; }

// Whether the kernels of a row add qv.v to the scores.
constexpr bool has_qv(uint32_t set) { return (set & score_mods::Qv) != 0; }

// Whether the forward kernels of a row read keys from a cache. No call with a cache has a bias or
// drops anything.
constexpr bool reads_cache(uint32_t set) {
  return (set & (score_mods::Bias | score_mods::Dropout)) == 0;
}

// What a row computes.
struct KernelKey {
  Arch arch;
  Direction direction;
  DType dtype;
  // The largest head_dim that the row serves. It serves smaller multiples of 8 too: the kernel
  // fills the rest with zeros on the chip.
  int32_t head_dim;
  int32_t head_dim_v;   // the same for v and the output
  uint32_t score_mods;  // a set of score_mods
  uint32_t features;    // every Feature that the row serves, those of its modifiers among them
};

// The features that every kernel computes from a run-time argument.
constexpr uint32_t kFeaturesOfAllRows = kSink;

// The key of a row of the tables.
constexpr KernelKey kernel_key(Arch arch, Direction direction, DType dtype, int32_t head_dim,
                               int32_t head_dim_v, uint32_t score_mods) {
  bool const cache = direction == Direction::Forward && reads_cache(score_mods);
  return {arch,
          direction,
          dtype,
          head_dim,
          head_dim_v,
          score_mods,
          score_mods | kFeaturesOfAllRows | (cache ? uint32_t(kCache) : 0)};
}

// How a row computes it.
struct KernelConfig {
  int32_t tile_m;  // queries of a tile
  int32_t tile_n;  // keys of a tile
  int32_t stages;  // shared-memory buffers of K and of V
  int32_t warps;   // warps of a CTA, producers included
};

// The most shared memory, in bytes, that a CTA has on any chip that runs the family (CUDA C++
// Programming Guide, "Technical Specifications per Compute Capability"). Chips of compute
// capability 8.6, 8.9 and 12.0 give it only 99 KB: dispatch compares what a row needs with the
// limit of the device at hand.
constexpr int32_t max_shared_memory(Arch arch) {
  return arch == Arch::Sm90 ? 227 * 1024 : 163 * 1024;
}

}  // namespace cute_attention
