// combine_splits.cu: the kernel that combines the splits of keys (core/key_splits.h).
#include "cute_attention/core/combine_splits.h"

#include <cuda_runtime.h>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/element.h"

namespace cute_attention {
namespace {

constexpr int kThreads = 128;
constexpr int kMostCtas = 1 << 20;  // what is more takes several rounds
constexpr int kWarp = 32;
constexpr int kVector = 4;  // columns of a thread
constexpr int kAhead = 8;   // loads that are under way at the same time
constexpr uint32_t kAllLanes = 0xffffffffu;

// The place of row `index` of an LSE in the output.
struct OutputRow {
  bool inside;  // it is of a sequence
  int32_t head;
  int64_t o;  // elements before it

  __device__ OutputRow(ForwardParams const& params, int32_t index) {
    bool const packed = params.cu_seqlens_q != nullptr;
    int32_t const rows = packed ? int32_t(params.total_q) : params.seqlen_q;
    int32_t const head_of_all = index / rows, row = index % rows;
    int32_t const batch = head_of_all / params.heads;
    inside = !packed || row < params.cu_seqlens_q[params.batch];
    head = head_of_all % params.heads;
    o = batch * params.o_stride.batch + head * params.o_stride.head + row * params.o_stride.row;
  }
};

// The splits of a row, four of which each thread of a warp has at most: split lane + 32 * i.
struct RowSplits {
  static constexpr int kOfThread = kMostSplits / kWarp;
  float weights[kOfThread];
  float base;
  float sum;

  __device__ RowSplits(ForwardParams const& params, int64_t row, int lane) {
    SplitSum sums[kOfThread];
    base = -INFINITY;
    CUTE_UNROLL
    for (int i = 0; i < kOfThread; ++i) {
      int const split = lane + i * kWarp;
      sums[i] = split < params.num_splits ? *split_sum(params, split, row) : SplitSum{0.f, 0.f};
      base = fmaxf(base, split_base(sums[i]));
    }
    CUTE_UNROLL
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      base = fmaxf(base, __shfl_xor_sync(kAllLanes, base, offset));
    }
    sum = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kOfThread; ++i) {
      weights[i] = split_weight(sums[i], base);
      sum += weights[i] == kUnseen ? 0.f : weights[i] * sums[i].sum;
    }
    CUTE_UNROLL
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
  }

  // All threads of the warp ask for the same split.
  __device__ float weight(int split) const {
    float found = weights[0];
    CUTE_UNROLL
    for (int i = 1; i < kOfThread; ++i) {
      found = split / kWarp == i ? weights[i] : found;
    }
    return __shfl_sync(kAllLanes, found, split % kWarp);
  }
};

// The weighted sum of columns [col, col + kVector) of the splits of a row. All threads of a warp
// call it together; those whose columns are not `inside` read nothing.
__device__ float4 weighted_sum(ForwardParams const& params, RowSplits const& splits, int64_t row,
                               int32_t col, bool inside) {
  float4 total{0.f, 0.f, 0.f, 0.f};
  for (int first = 0; first < params.num_splits; first += kAhead) {
    float4 parts[kAhead];
    float weights[kAhead];
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      int const split = first + i;
      // Past the last split a weight of lane split % 32, which no split has: kUnseen.
      weights[i] = split < kMostSplits ? splits.weight(split) : kUnseen;
      bool const seen = weights[i] != kUnseen;
      parts[i] = seen && inside
                     ? *reinterpret_cast<float4 const*>(split_output(params, split, row) + col)
                     : float4{0.f, 0.f, 0.f, 0.f};
      weights[i] = seen ? weights[i] : 0.f;
    }
    CUTE_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      total.x += weights[i] * parts[i].x;
      total.y += weights[i] * parts[i].y;
      total.z += weights[i] * parts[i].z;
      total.w += weights[i] * parts[i].w;
    }
  }
  return total;
}

// Waits until the splits are there, and their memory can be read. Only a library of sm90 needs it:
// launch() lets no other kernel begin before. PTX ISA, "griddepcontrol".
__device__ void await_splits() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// One warp for each row of the output, of which there are at most kMostSplitRows.
template <class Element>
__global__ void __launch_bounds__(kThreads) combine(CUTE_GRID_CONSTANT ForwardParams const params) {
  int const lane = int(threadIdx.x) % kWarp;
  GridWarp const warp = grid_warp(blockIdx.x, gridDim.x, threadIdx.x, kThreads);
  int64_t const rows = lse_size(params);
  await_splits();
  for (int64_t index = warp.index; index < rows; index += warp.count) {
    OutputRow const target(params, int32_t(index));
    if (!target.inside) {
      continue;
    }
    RowSplits const splits(params, index, lane);
    CombinedRow const row =
        combined_row(splits.base, splits.sum,
                     params.sink == nullptr ? nullptr : params.sink + target.head, params.dropout);
    auto* const o = static_cast<Element*>(params.o) + target.o;
    for (int32_t begin = 0; begin < params.head_dim_v; begin += kWarp * kVector) {
      int32_t const col = begin + kVector * lane;
      bool const inside = col < params.head_dim_v;
      float4 const sum = weighted_sum(params, splits, index, col, inside);
      if (inside) {
        *reinterpret_cast<uint2*>(o + col) =
            uint2{pack<Element>(sum.x * row.factor, sum.y * row.factor),
                  pack<Element>(sum.z * row.factor, sum.w * row.factor)};
      }
    }
    if (params.lse != nullptr && lane == 0) {
      params.lse[index] = row.lse;
    }
  }
}

// In a library of sm90 the kernel is launched before the one that computes the splits has ended, so
// that it only has to wait for what that one writes (CUDA C++ Programming Guide, "Programmatic
// Dependent Launch").
template <class Element>
int32_t launch(ForwardParams const& params, Arch arch, cudaStream_t stream) {
  constexpr int kRows = kThreads / kWarp;  // of a CTA
  int64_t const ctas = (lse_size(params) + kRows - 1) / kRows;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas < kMostCtas ? ctas : kMostCtas));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = arch == Arch::Sm90 ? 1 : 0;
  return cudaLaunchKernelEx(&config, &combine<Element>, params);
}

}  // namespace

int32_t combine_splits(ForwardParams const& params, KernelKey const& key, void* stream) {
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  return key.dtype == DType::Float16 ? launch<cutlass::half_t>(params, key.arch, cuda_stream)
                                     : launch<cutlass::bfloat16_t>(params, key.arch, cuda_stream);
}

}  // namespace cute_attention
