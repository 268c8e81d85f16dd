// sm80/grad_bias_launch.h: launches the kernels for the gradient of a bias, of rows that have one.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm80/grad_bias_kernel.h"

namespace cute_attention::sm80 {

template <class Row, int kMaxBytes, bool kSums>
__global__ void __launch_bounds__(GradBiasTraits<Row, kMaxBytes>::kThreads,
                                  kSums ? GradBiasTraits<Row, kMaxBytes>::kCtasOfSums
                                        : GradBiasTraits<Row, kMaxBytes>::kCtas)
    grad_bias(CUTE_GRID_CONSTANT BackwardParams const params,
              CUTE_GRID_CONSTANT GradBiasSchedule const schedule) {
  using Kernel = GradBiasKernel<Row, kMaxBytes, kSums>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory);
  Kernel(params, schedule, shared).run();
}

// Adds up the parts, one number a thread.
constexpr int kGradBiasSumThreads = 256;
template <class Row, int kMaxBytes>
__global__ void __launch_bounds__(kGradBiasSumThreads)
    grad_bias_sum(CUTE_GRID_CONSTANT BackwardParams const params, int32_t parts) {
  GradBiasStore<GradBiasTraits<Row, kMaxBytes>>::add_parts(
      params, parts, int64_t(blockIdx.x) * kGradBiasSumThreads + int64_t(threadIdx.x));
}

//   kMaxBytes  the shared memory of the row's backward kernel
template <class Row, int kMaxBytes>
struct GradBiasLaunch {
  static constexpr bool kHasBias = (Row::kKey.score_mods & score_mods::Bias) != 0;

  // How many numbers the workspace of the parts has.
  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    if constexpr (kHasBias) {
      using Traits = GradBiasTraits<Row, kMaxBytes>;
      int64_t const parts =
          params.grad_bias.data == nullptr ? 1 : schedule<Traits>(params, device).parts;
      return parts == 1 ? 0 : parts * grad_bias_part_numbers(params, Traits::kTile);
    } else {
      return 0;
    }
  }

  // After the LSE and delta are in `params.delta`. Does nothing where the gradient is not wanted.
  static cudaError_t launch(BackwardParams const& params, DeviceInfo const& device,
                            cudaStream_t stream) {
    if constexpr (kHasBias) {
      using Traits = GradBiasTraits<Row, kMaxBytes>;
      BlockGrid const grid = grad_bias_grid(params, Traits::kTile);
      if (params.grad_bias.data == nullptr || grid.count() == 0) {
        return cudaSuccess;
      }
      GradBiasSchedule how = schedule<Traits>(params, device);
      if (params.grad_bias_parts == nullptr) {
        how.parts = 1;
      }
      int64_t const ctas = grad_bias_ctas(grid, how);
      if (ctas > kMaxTiles) {
        return cudaErrorInvalidConfiguration;
      }
      constexpr int kBytes = int(sizeof(typename Traits::SharedMemory));
      constexpr auto kSummer = &grad_bias<Row, kMaxBytes, true>;
      constexpr auto kWriter = &grad_bias<Row, kMaxBytes, false>;
      cudaError_t const error = how.sums ? allow_shared_memory<kSummer>(kBytes, device.ordinal)
                                         : allow_shared_memory<kWriter>(kBytes, device.ordinal);
      if (error != cudaSuccess) {
        return error;
      }
      auto const kernel = how.sums ? kSummer : kWriter;
      kernel<<<unsigned(ctas), Traits::kThreads, kBytes, stream>>>(params, how);
      if (how.parts > 1) {
        int64_t const numbers = grad_bias_part_numbers(params, Traits::kTile);
        grad_bias_sum<Row, kMaxBytes>
            <<<unsigned((numbers + kGradBiasSumThreads - 1) / kGradBiasSumThreads),
               kGradBiasSumThreads, 0, stream>>>(params, how.parts);
      }
    }
    return cudaSuccess;
  }

 private:
  template <class Traits>
  static GradBiasSchedule schedule(BackwardParams const& params, DeviceInfo const& device) {
    return grad_bias_schedule(params, Traits::kTile,
                              int64_t(device.multiprocessors) * Traits::kCtasOfSums);
  }
};

}  // namespace cute_attention::sm80
