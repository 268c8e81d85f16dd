// core/global_sum.h: adds the register fragments of all threads of a CTA to a block of global
// memory, and reads them back.
#pragma once

#include <cute/tensor.hpp>

namespace cute_attention {

// How many floats one atomic addition takes: PTX ISA, "red", has .v4.f32 from sm_90 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kSumVector = 4;
#else
constexpr int kSumVector = 1;
#endif
using SumVector = cutlass::AlignedArray<float, kSumVector>;

// Adds `value` if `wanted`. Adding always, and zeros in the first step, would take fewer
// instructions, but from -O2 on ptxas then moves all additions in front of the MMAs between which
// they should run: 313 TFLOP/s against 336 at head dim 128 on an NVIDIA H200.
CUTE_DEVICE void add_to_global(SumVector* address, SumVector const& value, bool wanted) {
  if constexpr (kSumVector == 4) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %5, 0;"
        " @p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4}; }" ::"l"(address),
        "f"(value[0]), "f"(value[1 % kSumVector]), "f"(value[2 % kSumVector]),
        "f"(value[3 % kSumVector]), "r"(int(wanted))
        : "memory");
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %2, 0;"
        " @p red.relaxed.gpu.global.add.f32 [%0], %1; }" ::"l"(address),
        "f"(value[0]), "r"(int(wanted))
        : "memory");
  }
}

// Which vector of a block is vector v of `thread`: in this order a warp accesses whole cache lines.
template <int kThreads>
CUTE_HOST_DEVICE constexpr int vector_in_block(int v, int thread) {
  return v * kThreads + thread;
}

// Adds vector v of a fragment, which may have any static layout.
template <int kThreads, class Fragment>
CUTE_DEVICE void add_vector(float* block, Fragment const& fragment, int v, int thread,
                            bool wanted) {
  SumVector vector;
  CUTE_UNROLL
  for (int i = 0; i < kSumVector; ++i) {
    vector[i] = fragment(v * kSumVector + i);
  }
  add_to_global(reinterpret_cast<SumVector*>(block) + vector_in_block<kThreads>(v, thread), vector,
                wanted);
}

// Reads this thread's fragment back from a block.
template <int kThreads, class Fragment>
CUTE_DEVICE void load_fragment(float const* block, Fragment& fragment, int thread) {
  using namespace cute;
  CUTE_UNROLL
  for (int v = 0; v < decltype(size(fragment))::value / kSumVector; ++v) {
    SumVector const vector =
        reinterpret_cast<SumVector const*>(block)[vector_in_block<kThreads>(v, thread)];
    CUTE_UNROLL
    for (int i = 0; i < kSumVector; ++i) {
      fragment(v * kSumVector + i) = vector[i];
    }
  }
}

}  // namespace cute_attention
