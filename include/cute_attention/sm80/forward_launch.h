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
    forward(CUTE_GRID_CONSTANT ForwardParams const params) {
  using Kernel = ForwardKernel<Row, kPlace>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory);
  constexpr int kThreads = Row::kConfig.warps * 32;
  WorkTile const work = work_tile(params, Kernel::kTileM, int(blockIdx.x));
  if (Kernel::split() == 0) {
    clear_unused_rows<typename Kernel::Element>(
        params, grid_warp(blockIdx.x, gridDim.x, threadIdx.x, kThreads));
  }
  mark_queries_without_tile<typename Kernel::Element>(params, work, Kernel::kTileM, kThreads,
                                                      Kernel::split());
  Kernel(params, shared, work).run();
}

template <class Row>
struct ForwardLaunch {
  static constexpr int kThreads = ForwardTraits<Row>::kThreads;
  static constexpr int kSharedMemoryBytes = int(sizeof(typename ForwardTraits<Row>::SharedMemory));

  // A LaunchFunction (kernel_library.h); `params` points to a ForwardParams with at least one
  // query.
  static int32_t launch(void const* params, LaunchContext const* context) {
    ForwardParams const forward_params =
        with_groups_as_queries(*static_cast<ForwardParams const*>(params));
    if constexpr (reads_cache(Row::kKey.score_mods)) {
      if (has_pages(forward_params)) {
        return launch_for<KeyPlace::Pages>(forward_params, context);
      }
    }
    return launch_for<KeyPlace::Rows>(forward_params, context);
  }

  // A GridFunction (kernel_library.h).
  static ForwardGrid grid(ForwardParams const* params) {
    constexpr int32_t kTileM = ForwardTraits<Row>::kTileM;
    ForwardParams const told = with_groups_as_queries(*params);
    int32_t const group = told.heads / told.heads_kv;
    return {packed_tiles(told, kTileM, {0, group, group}) * told.heads_kv, kTileM};
  }

 private:
  template <KeyPlace kPlace>
  static int32_t launch_for(ForwardParams const& params, LaunchContext const* context) {
    if constexpr (kSharedMemoryBytes > 48 * 1024) {  // a kernel that needs more has to ask for it
      cudaError_t const error =
          allow_shared_memory<&forward<Row, kPlace>>(kSharedMemoryBytes, context->device->ordinal);
      if (error != cudaSuccess) {
        return error;
      }
    }
    int64_t const tiles = work_tiles(params, ForwardTraits<Row>::kTileM);
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
