// core/resident_warps.h: how many warps of a forward kernel the registers of an SM hold.
#pragma once

#include "cute_attention/config.h"

namespace cute_attention {

// Of sm90 rows whose CTAs share an SM (ForwardTraits::kSharesSm): the warpgroups that compute.
constexpr int32_t kConsumersOfSm = 4;

// Of sm80 kernels. 12 warps, if S and O take at most 128 registers of a thread (the rest needs at
// most 40, but with a bias more), and if the 228 KB of shared memory of the largest chips hold the
// tiles of so many CTAs. Else 8, as in CTAs of two warps, where a thread copies twice as many
// vectors of K and V: at head dim 64 one register would spill. More warps hide more latency: on an
// NVIDIA H200 at head dim 64, 4096 tokens, full, three CTAs with tiles of 128 x 64 reach 361
// TFLOP/s, two CTAs with tiles of 128 x 128 reach 357.
constexpr int32_t resident_warps(KernelKey const& key, KernelConfig const& config,
                                 int32_t shared_memory_bytes) {
  int32_t const accumulators =
      config.tile_m * (config.tile_n + key.head_dim_v) / (config.warps * 32);
  bool const fits = 12 / config.warps * (shared_memory_bytes + 1024) <= 228 * 1024;
  bool const few = accumulators <= 128 && (key.score_mods & score_mods::Bias) == 0;
  return config.warps > 2 && few && fits ? 12 : 8;
}

}  // namespace cute_attention
