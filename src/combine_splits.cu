// combine_splits.cu: the kernel that combines the splits of keys (core/key_splits.h).
#include "cute_attention/core/combine_splits.h"

#include <cuda_runtime.h>

#include "cute_attention/core/combine_row.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/element.h"

namespace cute_attention {
namespace {

constexpr int kWarps = kMostMembers;  // of a CTA
constexpr int kWarp = 32;
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

// A team of warps for each row of the output, of which there are at most kMostSplitRows, and for
// kCombinedCols of its columns, those of blockIdx.y. Its first warp adds up what the members have.
template <class Element>
__global__ void __launch_bounds__(kWarps* kWarp, 1)
    combine(CUTE_GRID_CONSTANT ForwardParams const params, int const team) {
  __shared__ float4 partial[kWarps][kWarp];
  int const lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  int const member = warp % team, teams = kWarps / team;
  int32_t const col = int32_t(blockIdx.y) * kCombinedCols + 4 * lane;
  int64_t const rows = lse_size(params);
  await_kernel_before();
  for (int64_t begin = int64_t(blockIdx.x) * teams; begin < rows;
       begin += int64_t(gridDim.x) * teams) {
    int64_t const index = begin + warp / team;
    int64_t const row = index < rows ? index : rows - 1;
    SplitParts parts;
    parts.load(params, row, col, member, team);
    RowSplits<kMostSplits> const splits(params, row);
    float4 total = weighted_sum(params, splits, parts, row, col, member, team);
    if (team > 1) {
      partial[warp][lane] = total;
      __syncthreads();
      for (int other = warp + 1; member == 0 && other < warp + team; ++other) {
        total = sum_of(total, partial[other][lane]);
      }
      __syncthreads();  // the next row may overwrite it
    }
    OutputRow<Element> const target(params, int32_t(row));
    if (member == 0 && index < rows && target.inside) {
      store_combined<Element>(params, splits, target, total, col);
    }
  }
}

// In a library of sm90 the kernel is launched before the one that computes the splits has ended, so
// that it only has to wait for what that one writes.
template <class Element>
int32_t launch(ForwardParams const& params, Arch arch, cudaStream_t stream) {
  int const team = team_size(params.num_splits), teams = kWarps / team;
  int64_t const ctas = (lse_size(params) + teams - 1) / teams;
  dim3 const grid(unsigned(ctas < kMostCtas ? ctas : kMostCtas),
                  unsigned((params.head_dim_v + kCombinedCols - 1) / kCombinedCols));
  return launch_kernel(arch == Arch::Sm90, &combine<Element>, grid, kWarps * kWarp, 0, stream,
                       params, team);
}

}  // namespace

int32_t combine_splits(ForwardParams const& params, KernelKey const& key, void* stream) {
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  return key.dtype == DType::Float16 ? launch<cutlass::half_t>(params, key.arch, cuda_stream)
                                     : launch<cutlass::bfloat16_t>(params, key.arch, cuda_stream);
}

}  // namespace cute_attention
