// sm80/grad_bias_launch.h: launches the kernels for the gradient of a bias, of rows that have one.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/grad_bias_launch.h"
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

// The launches of the kernels with some traits.
template <class Traits>
struct GradBiasKernels {
  using Passes = GradBiasPasses<Traits>;

  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    return Passes::workspace(params, device);
  }

  // After the LSE and delta are in `params.delta`.
  static cudaError_t launch(BackwardParams const& params, DeviceInfo const& device,
                            cudaStream_t stream) {
    return Passes::launch(params, device, stream, [&](GradBiasSchedule const& how, int64_t ctas) {
      constexpr int kBytes = int(sizeof(typename Traits::SharedMemory));
      constexpr auto kSummer = &grad_bias<Traits, true>;
      constexpr auto kWriter = &grad_bias<Traits, false>;
      cudaError_t const error = how.sums ? allow_shared_memory<kSummer>(kBytes, device.ordinal)
                                         : allow_shared_memory<kWriter>(kBytes, device.ordinal);
      if (error == cudaSuccess) {
        auto const kernel = how.sums ? kSummer : kWriter;
        kernel<<<unsigned(ctas), Traits::kThreads, kBytes, stream>>>(params, how);
      }
      return error;
    });
  }
};

//   kMaxBytes  the shared memory of the row's backward kernel
template <class Row, int kMaxBytes>
struct GradBiasLaunch {
  static constexpr bool kHasBias = (Row::kKey.score_mods & score_mods::Bias) != 0;
  static constexpr bool kIsSmall = has_small_heads(Row::kKey.head_dim, Row::kKey.head_dim_v);

  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    if constexpr (kHasBias) {
      if (params.grad_bias.data != nullptr) {
        return Kernels::workspace(params, device);
      }
    }
    return 0;
  }

  // After the LSE and delta are in `params.delta`. Does nothing where the gradient is not wanted.
  static cudaError_t launch(BackwardParams const& params, DeviceInfo const& device,
                            cudaStream_t stream) {
    if constexpr (kHasBias) {
      if (params.grad_bias.data != nullptr) {
        return Kernels::launch(params, device, stream);
      }
    }
    return cudaSuccess;
  }

 private:
  using Kernels = GradBiasKernels<GradBiasTraits<Row, kMaxBytes, kIsSmall>>;
};

}  // namespace cute_attention::sm80
