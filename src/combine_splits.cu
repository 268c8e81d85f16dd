// combine_splits.cu: the kernel that combines the splits of keys (core/key_splits.h).
#include "cute_attention/core/combine_splits.h"

#include <cuda_runtime.h>

#include "cute_attention/core/combine_row.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/element.h"

namespace cute_attention {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = kMostMembers * kWarp;  // of a CTA
constexpr int kFewSplits = kWarp;               // a weight for each thread of a warp
// CTAs of an SM: as many as the registers of a thread, which keep eight reads under way, leave room
// for.
template <int kMost>
constexpr int kCtasOfSm = kMost <= kFewSplits ? 3 : 2;
// So many warps keep a GPU busy. Where there are rows for as many, several warps share none.
constexpr int kEnoughWarps = 8192;
constexpr int kMostCtas = 1 << 20;  // what is more takes several rounds

// Row `index` of an LSE in the output.
template <class Element>
struct OutputRow : RowTarget<Element> {
  bool inside;  // it is of a sequence

  __device__ OutputRow(ForwardParams const& params, int32_t index) {
    bool const packed = params.cu_seqlens_q != nullptr;
    int32_t const rows = packed ? int32_t(params.total_q) : params.seqlen_q;
    int32_t const head_of_all = index / rows, row = index % rows;
    int32_t const batch = head_of_all / params.heads;
    inside = !packed || row < params.cu_seqlens_q[params.batch];
    this->head = head_of_all % params.heads;
    this->o = static_cast<Element*>(params.o) + batch * params.o_stride.batch +
              this->head * params.o_stride.head + row * params.o_stride.row;
    this->lse = params.lse == nullptr ? nullptr : params.lse + index;
  }
};

// kLanes threads for each row of the output, of which there are at most kMostSplitRows, and for
// 4 kLanes of its columns: those of blockIdx.y. Where there are few rows, `share` groups of so many
// threads share a row, one for each member of the team, and the first adds up what they have; or
// else one takes the members one after the other.
//   kMost  splits at most
template <class Element, int kMost, int kLanes>
__global__ void __launch_bounds__(kThreads, kCtasOfSm<kMost>)
    combine(CUTE_GRID_CONSTANT ForwardParams const params, int const team, int const share) {
  __shared__ float4 partial[kThreads];
  int const thread = int(threadIdx.x);
  int const group = thread / kLanes, first_member = group % share;
  int const rows_of_cta = kThreads / kLanes / share;
  int32_t const col = int32_t(blockIdx.y) * kCombinedCols + 4 * (thread % kLanes);
  int64_t const rows = lse_size(params);
  await_kernel_before();
  for (int64_t begin = int64_t(blockIdx.x) * rows_of_cta; begin < rows;
       begin += int64_t(gridDim.x) * rows_of_cta) {
    int64_t const index = begin + group / share;
    int64_t const row = index < rows ? index : rows - 1;
    RowSplits<kMost, kLanes> splits;
    float4 total = sum_of_members(params, splits, row, col, team, first_member, share);
    if (share > 1) {
      partial[thread] = total;
      __syncthreads();
      for (int member = 1; first_member == 0 && member < team; ++member) {
        total = sum_of(total, partial[thread + member * kLanes]);
      }
      __syncthreads();  // the next row may overwrite it
    }
    OutputRow<Element> const target(params, int32_t(row));
    if (first_member == 0 && index < rows && target.inside) {
      store_combined<Element>(params, splits, target, total, col);
    }
  }
}

// In a library of sm90 the kernel is launched before the one that computes the splits has ended, so
// that it only has to wait for what that one writes.
template <class Element, int kMost, int kLanes>
int32_t launch(ForwardParams const& params, Arch arch, cudaStream_t stream) {
  int const team = team_size(params.num_splits);
  int64_t const rows = lse_size(params);
  int const share = rows * team * kLanes <= int64_t{kEnoughWarps} * kWarp ? team : 1;
  int64_t const rows_of_cta = kThreads / kLanes / share;
  int64_t const ctas = (rows + rows_of_cta - 1) / rows_of_cta;
  dim3 const grid(unsigned(ctas < kMostCtas ? ctas : kMostCtas),
                  unsigned((params.head_dim_v + kCombinedCols - 1) / kCombinedCols));
  return launch_kernel(arch == Arch::Sm90, &combine<Element, kMost, kLanes>, grid, kThreads, 0,
                       stream, params, team, share);
}

template <class Element>
int32_t launch(ForwardParams const& params, Arch arch, cudaStream_t stream) {
  if (params.num_splits > kFewSplits) {
    return launch<Element, kMostSplits, kWarp>(params, arch, stream);
  }
  // A row of few columns takes half of a warp.
  return params.head_dim_v <= kCombinedCols / 2
             ? launch<Element, kFewSplits, kWarp / 2>(params, arch, stream)
             : launch<Element, kFewSplits, kWarp>(params, arch, stream);
}

}  // namespace

int32_t combine_splits(ForwardParams const& params, KernelKey const& key, void* stream) {
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  return key.dtype == DType::Float16 ? launch<cutlass::half_t>(params, key.arch, cuda_stream)
                                     : launch<cutlass::bfloat16_t>(params, key.arch, cuda_stream);
}

}  // namespace cute_attention
