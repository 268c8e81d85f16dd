// sm80/grad_bias_launch.h: launches the kernels for the gradient of a bias, of rows that have one.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm80/grad_bias_kernel.h"

namespace cute_attention::sm80 {

template <class Traits, bool kSums>
__global__ void __launch_bounds__(Traits::kThreads, kSums ? Traits::kCtasOfSums : Traits::kCtas)
    grad_bias(CUTE_GRID_CONSTANT BackwardParams const params,
              CUTE_GRID_CONSTANT GradBiasSchedule const schedule) {
  using Kernel = GradBiasKernel<Traits, kSums>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory);
  Kernel(params, schedule, shared).run();
}

// Adds up the parts, one number a thread.
constexpr int kGradBiasSumThreads = 256;
template <class Traits>
__global__ void __launch_bounds__(kGradBiasSumThreads)
    grad_bias_sum(CUTE_GRID_CONSTANT BackwardParams const params, int32_t parts) {
  GradBiasStore<Traits>::add_parts(
      params, parts, int64_t(blockIdx.x) * kGradBiasSumThreads + int64_t(threadIdx.x));
}

// The launches of the kernels with some traits.
template <class Traits>
struct GradBiasKernels {
  static GradBiasSchedule schedule(BackwardParams const& params, DeviceInfo const& device) {
    return grad_bias_schedule(params, Traits::kTile,
                              int64_t(device.multiprocessors) * Traits::kCtasOfSums);
  }

  // How many numbers the workspace of the parts has.
  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    int64_t const parts = schedule(params, device).parts;
    return parts == 1 ? 0 : parts * grad_bias_part_numbers(params, Traits::kTile);
  }

  static cudaError_t launch(BackwardParams const& params, DeviceInfo const& device,
                            cudaStream_t stream) {
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
    constexpr int kBytes = int(sizeof(typename Traits::SharedMemory));
    constexpr auto kSummer = &grad_bias<Traits, true>;
    constexpr auto kWriter = &grad_bias<Traits, false>;
    cudaError_t const error = how.sums ? allow_shared_memory<kSummer>(kBytes, device.ordinal)
                                       : allow_shared_memory<kWriter>(kBytes, device.ordinal);
    if (error != cudaSuccess) {
      return error;
    }
    auto const kernel = how.sums ? kSummer : kWriter;
    kernel<<<unsigned(ctas), Traits::kThreads, kBytes, stream>>>(params, how);
    if (how.parts > 1) {
      int64_t const numbers = grad_bias_part_numbers(params, Traits::kTile);
      grad_bias_sum<Traits><<<unsigned((numbers + kGradBiasSumThreads - 1) / kGradBiasSumThreads),
                              kGradBiasSumThreads, 0, stream>>>(params, how.parts);
    }
    return cudaSuccess;
  }
};

//   kMaxBytes  the shared memory of the row's backward kernel
template <class Row, int kMaxBytes>
struct GradBiasLaunch {
  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    int64_t numbers = 0;
    with_kernels(params, [&](auto kernels) { numbers = kernels.workspace(params, device); });
    return numbers;
  }

  // After the LSE and delta are in `params.delta`. Does nothing where the gradient is not wanted.
  static cudaError_t launch(BackwardParams const& params, DeviceInfo const& device,
                            cudaStream_t stream) {
    cudaError_t error = cudaSuccess;
    with_kernels(params, [&](auto kernels) { error = kernels.launch(params, device, stream); });
    return error;
  }

 private:
  static constexpr KernelKey kKey = Row::kKey;

  // Calls use(GradBiasKernels) with those of a call that wants the gradient. Rows of sm90 begin at
  // head dim 64, so their calls may have small heads.
  template <class Use>
  static void with_kernels(BackwardParams const& params, Use const& use) {
    if constexpr ((kKey.score_mods & score_mods::Bias) != 0) {
      constexpr bool kIsSmall = has_small_heads(kKey.head_dim, kKey.head_dim_v);
      constexpr bool kServesSmall = kKey.arch == Arch::Sm90 && kKey.head_dim == 64;
      if (params.grad_bias.data == nullptr) {
        return;
      }
      if constexpr (kServesSmall) {
        if (has_small_heads(params.head_dim, params.head_dim_v)) {
          return use(GradBiasKernels<GradBiasTraits<Row, kMaxBytes, true>>{});
        }
      }
      use(GradBiasKernels<GradBiasTraits<Row, kMaxBytes, kIsSmall>>{});
    }
  }
};

}  // namespace cute_attention::sm80
