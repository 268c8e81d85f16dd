// sm80/forward_launch.h: launches the sm80 forward kernel of one row.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/combine_splits.h"
#include "cute_attention/core/group_queries.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm80/forward_kernel.h"

namespace cute_attention::sm80 {

// How many CTAs the registers of a multiprocessor must hold.
template <class Row>
constexpr int ctas_of(KeyPlace place) {
  return place == KeyPlace::Pages ? ForwardTraits<Row>::kCtasOfPages : ForwardTraits<Row>::kCtas;
}

template <class Row, KeyPlace kPlace>
__global__ void __launch_bounds__(ForwardTraits<Row>::kThreads, ctas_of<Row>(kPlace))
    forward(CUTE_GRID_CONSTANT typename ForwardKernel<Row, kPlace>::Params const params) {
  using Kernel = ForwardKernel<Row, kPlace>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory);
  constexpr int kThreads = Row::kConfig.warps * 32;
  WorkTile const work = Kernel::Rows::tile(params, int(blockIdx.x));
  if (Kernel::split() == 0) {
    clear_unused_rows<typename Kernel::Element>(
        params, grid_warp(blockIdx.x, gridDim.x, threadIdx.x, kThreads));
  }
  Kernel::Rows::mark_queries_without_tile(params, work, Kernel::split());
  Kernel(params, shared, work).run();
}

template <class Row>
struct ForwardLaunch {
  static constexpr int kThreads = ForwardTraits<Row>::kThreads;
  static constexpr int kSharedMemoryBytes = int(sizeof(typename ForwardTraits<Row>::SharedMemory));

  static constexpr int32_t kTileM = ForwardTraits<Row>::kTileM;

  // A LaunchFunction (kernel_library.h); `params` points to a ForwardParams with at least one
  // query.
  static int32_t launch(void const* params, LaunchContext const* context) {
    return launch_told(with_groups_as_queries(*static_cast<ForwardParams const*>(params)), context);
  }

  // The same of a call in which groups of heads are told as queries.
  static int32_t launch_told(ForwardParams const& params, LaunchContext const* context) {
    if constexpr (kHasFewQueriesKernel<Row>) {
      if (takes_few_queries_kernel(params)) {
        return ForwardLaunch<FewQueries<Row>>::launch_told(params, context);
      }
    }
    if constexpr (kPacksHeads<Row>) {
      return launch_anywhere(PackedForwardParams{params, packing_of(params)}, context);
    } else {
      return launch_anywhere(params, context);
    }
  }

  // A GridFunction (kernel_library.h).
  static ForwardGrid grid(ForwardParams const* params) {
    return grid_told(with_groups_as_queries(*params));
  }
  static ForwardGrid grid_told(ForwardParams const& params) {
    if constexpr (kHasFewQueriesKernel<Row>) {
      if (takes_few_queries_kernel(params)) {
        return ForwardLaunch<FewQueries<Row>>::grid_told(params);
      }
    }
    QueryPacking const packing = packing_of(params);
    return {packed_tiles(params, kTileM, packing) * params.heads_kv, packing.queries(kTileM)};
  }

 private:
  static QueryPacking packing_of(ForwardParams const& params) {
    return make_query_packing(params, kTileM, kPacksHeads<Row> ? kTileM : 1);
  }

  // How many CTAs a split of the keys takes.
  static int64_t tiles_of(ForwardParams const& params) { return work_tiles(params, kTileM); }
  static int64_t tiles_of(PackedForwardParams const& params) {
    PackedHeads const packed = packed_heads(params);
    return tile_count(packed.seqlen_q, params.packing.queries(kTileM), packed.heads, params.batch);
  }

  template <class Params>
  static int32_t launch_anywhere(Params const& params, LaunchContext const* context) {
    if constexpr (reads_cache(Row::kKey.score_mods)) {
      if (has_pages(params)) {
        return launch_for<KeyPlace::Pages>(params, context);
      }
    }
    return launch_for<KeyPlace::Rows>(params, context);
  }

  template <KeyPlace kPlace, class Params>
  static int32_t launch_for(Params const& params, LaunchContext const* context) {
    if constexpr (kSharedMemoryBytes > 48 * 1024) {  // a kernel that needs more has to ask for it
      cudaError_t const error =
          allow_shared_memory<&forward<Row, kPlace>>(kSharedMemoryBytes, context->device->ordinal);
      if (error != cudaSuccess) {
        return error;
      }
    }
    int64_t const tiles = tiles_of(params);
    if (tiles > kMaxTiles) {
      return cudaErrorInvalidConfiguration;
    }
    dim3 const ctas(unsigned(tiles), unsigned(params.num_splits));
    forward<Row, kPlace>
        <<<ctas, kThreads, kSharedMemoryBytes, static_cast<cudaStream_t>(context->stream)>>>(
            params);
    cudaError_t const error = cudaGetLastError();
    return error == cudaSuccess && has_splits(params)
               ? combine_splits(params, Row::kKey, context->stream)
               : error;
  }
};

}  // namespace cute_attention::sm80
