// core/grad_bias_launch.h: what the launches of all kernels for the gradient of a bias have in
// common: the schedule, the workspace of the parts, and the kernel that adds up the parts.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/grad_bias_store.h"
#include "cute_attention/kernel_library.h"

namespace cute_attention {

// Adds up the parts, one number a thread.
constexpr int kGradBiasSumThreads = 256;
template <class Traits>
__global__ void __launch_bounds__(kGradBiasSumThreads)
    grad_bias_sum(CUTE_GRID_CONSTANT BackwardParams const params, int32_t parts) {
  GradBiasStore<Traits>::add_parts(
      params, parts, int64_t(blockIdx.x) * kGradBiasSumThreads + int64_t(threadIdx.x));
}

//   Traits  those of the store (grad_bias_store.h), and kCtasOfSums: how many CTAs of the kernel
//   for
//           sums a multiprocessor runs at the same time
template <class Traits>
struct GradBiasPasses {
  static GradBiasSchedule schedule(BackwardParams const& params, DeviceInfo const& device) {
    return grad_bias_schedule(params, Traits::kTile,
                              int64_t(device.multiprocessors) * Traits::kCtasOfSums);
  }

  // How many numbers the workspace of the parts has.
  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    int64_t const parts = schedule(params, device).parts;
    return parts == 1 ? 0 : parts * grad_bias_part_numbers(params, Traits::kTile);
  }

  // Launches the kernel that computes the gradient or the sums of its parts, and the one that adds
  // these up.
  //   launch_main(how, ctas)  launches the first, for what `ctas` CTAs have to visit; returns a
  //                           cudaError_t
  template <class LaunchMain>
  static cudaError_t launch(BackwardParams const& params, DeviceInfo const& device,
                            cudaStream_t stream, LaunchMain const& launch_main) {
    BlockGrid const grid = grad_bias_grid(params, Traits::kTile);
    if (grid.count() == 0) {
      return cudaSuccess;
    }
    GradBiasSchedule how = schedule(params, device);
    if (params.grad_bias_parts == nullptr) {
      how.parts = 1;
    }
    int64_t const ctas = grad_bias_ctas(grid, how);
    if (ctas > kMaxTiles) {
      return cudaErrorInvalidConfiguration;
    }
    cudaError_t const error = launch_main(how, ctas);
    if (error == cudaSuccess && how.parts > 1) {
      int64_t const numbers = grad_bias_part_numbers(params, Traits::kTile);
      grad_bias_sum<Traits><<<unsigned((numbers + kGradBiasSumThreads - 1) / kGradBiasSumThreads),
                              kGradBiasSumThreads, 0, stream>>>(params, how.parts);
    }
    return error;
  }
};

}  // namespace cute_attention
