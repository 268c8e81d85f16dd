// config.h: the question a kernel answers (KernelKey), how it answers it (KernelConfig), and what
// fits on a chip.
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

// What happens to a score after the scale and before the mask.
enum class ScoreMod : int32_t { None, Softcap };

// What a row computes.
struct KernelKey {
  Arch arch;
  Direction direction;
  DType dtype;
  int32_t
      head_dim;  // the largest head_dim it serves; smaller multiples of 8 are zero-filled on chip
  int32_t head_dim_v;  // likewise for v and the output
  ScoreMod score_mod;
};

// How a row computes it.
struct KernelConfig {
  int32_t tile_m;  // queries of a tile
  int32_t tile_n;  // keys of a tile
  int32_t stages;  // shared-memory buffers of K and of V
  int32_t warps;   // warps of a CTA, producers included
};

// Shared memory that one CTA may use, in bytes (CUDA C++ Programming Guide, "Technical
// Specifications per Compute Capability"). Chips of 8.6, 8.9 and 12.0 stop at 99 KB; the device's
// own limit decides at run time.
constexpr int32_t max_shared_memory(Arch arch) {
  return arch == Arch::Sm90 ? 227 * 1024 : 163 * 1024;
}

}  // namespace cute_attention
