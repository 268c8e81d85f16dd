// sm80/backward_launch.h: launches the sm80 backward kernels of one row.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/backward_passes.h"
#include "cute_attention/core/backward_prepare.h"
#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm80/backward_finish.h"
#include "cute_attention/sm80/backward_kernel.h"
#include "cute_attention/sm80/grad_bias_launch.h"

namespace cute_attention::sm80 {

template <class Row>
__global__ void __launch_bounds__(Row::kConfig.warps * 32)
    backward(CUTE_GRID_CONSTANT BackwardParams const params,
             CUTE_GRID_CONSTANT GradSchedule const schedule) {
  using Kernel = BackwardKernel<Row>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory);
  Kernel(params, shared, schedule.tile(int(blockIdx.x)), schedule.parts).run();
}

template <class Row>
__global__ void __launch_bounds__(Row::kConfig.warps * 32)
    backward_prepare(CUTE_GRID_CONSTANT BackwardParams const params) {
  BackwardPrepare<BackwardTraits<Row>>::run(params, last_first(params, Row::kConfig.tile_m));
}

template <class Row>
__global__ void __launch_bounds__(Row::kConfig.warps * 32)
    backward_finish(CUTE_GRID_CONSTANT BackwardParams const params,
                    CUTE_GRID_CONSTANT PartSums const sums) {
  using Finish = BackwardFinish<Row>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Finish::run(params, sums, reinterpret_cast<typename Finish::Element*>(shared_memory));
}

template <class Row>
struct BackwardLaunch {
  using Traits = BackwardTraits<Row>;
  using Sums = typename BackwardFinish<Row>::Sums;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kSharedMemoryBytes = int(sizeof(typename Traits::SharedMemory));

  // A WorkspaceFunction (kernel_library.h).
  static void workspace(BackwardParams const* params, DeviceInfo const* device,
                        BackwardWorkspace* sizes) {
    *sizes = grad_workspace<false>(
        *params, {Traits::kTileM, Traits::kTileN, Traits::kHeadDim, Traits::kHeadDimV},
        most_part_blocks(*params, Traits::kTileM, Traits::kTileN, ctas(*device), device->l2_bytes,
                         false));
    sizes->grad_bias_parts = GradBiasLaunch<Row, kSharedMemoryBytes>::workspace(*params, *device);
  }

  // A LaunchFunction (kernel_library.h); `params` points to a BackwardParams.
  static int32_t launch(void const* params, LaunchContext const* context) {
    auto const& backward_params = *static_cast<BackwardParams const*>(params);
    auto const stream = static_cast<cudaStream_t>(context->stream);
    BackwardParams const passes = params_of_passes(backward_params, Traits::kTileM);
    int64_t const m_tiles = work_tiles(passes, Traits::kTileM);
    int64_t const n_tiles = tile_count(backward_params.seqlen_k, Traits::kTileN,
                                       backward_params.heads_kv, backward_params.batch);
    if (m_tiles > kMaxTiles || n_tiles > kMaxTiles) {
      return cudaErrorInvalidConfiguration;
    }
    // Queries and sums of dQ may take half of the L2 cache; the other half is for K, V and for data
    // that is read or written once.
    GradSchedule const schedule = make_grad_schedule(
        backward_params, Traits::kTileM, Traits::kTileN, context->device->l2_bytes / 2,
        ctas(*context->device), division(backward_params, *context->device));
    PartSums const sums = Sums::part_sums(schedule);
    cudaError_t error =
        allow_shared_memory<&backward<Row>>(kSharedMemoryBytes, context->device->ordinal);
    if (error != cudaSuccess) {
      return error;
    }
    if (m_tiles > 0) {
      backward_prepare<Row><<<unsigned(m_tiles), kThreads, 0, stream>>>(passes);
    }
    if (n_tiles > 0) {
      backward<Row><<<unsigned(schedule.tiles()), kThreads, kSharedMemoryBytes, stream>>>(
          backward_params, schedule);
    }
    if (m_tiles > 0) {
      backward_finish<Row>
          <<<unsigned(sums.ctas + m_tiles), kThreads, Traits::kSmemBytesGradQ, stream>>>(passes,
                                                                                         sums);
    }
    error =
        GradBiasLaunch<Row, kSharedMemoryBytes>::launch(backward_params, *context->device, stream);
    return error == cudaSuccess ? cudaGetLastError() : error;
  }

 private:
  // How many CTAs of the backward kernel run at the same time.
  static int64_t ctas(DeviceInfo const& device) {
    return int64_t(device.multiprocessors) * (8 / Row::kConfig.warps);
  }
  // How the steps of a block of keys are divided.
  static BlockDivision division(BackwardParams const& params, DeviceInfo const& device) {
    return grad_division(params, Traits::kTileM, Traits::kTileN, ctas(device), device.l2_bytes,
                         false);
  }
};

}  // namespace cute_attention::sm80
