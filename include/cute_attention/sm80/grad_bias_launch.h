// sm80/grad_bias_launch.h: launches the kernel for the gradient of a bias, of rows that have one.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/once_per_device.h"
#include "cute_attention/sm80/grad_bias_kernel.h"

namespace cute_attention::sm80 {

template <class Row>
__global__ void __launch_bounds__(GradBiasTraits<Row>::kThreads, GradBiasTraits<Row>::kCtas)
    grad_bias(CUTE_GRID_CONSTANT BackwardParams const params) {
  using Kernel = GradBiasKernel<Row>;
  extern __shared__ __align__(128) unsigned char shared_memory[];
  Kernel(params, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory)).run();
}

// After the LSE and delta are in `params.delta`. Does nothing where the gradient is not wanted.
template <class Row>
cudaError_t launch_grad_bias(BackwardParams const& params, int32_t device, cudaStream_t stream) {
  if constexpr ((Row::kKey.score_mods & score_mods::Bias) != 0) {
    using Traits = GradBiasTraits<Row>;
    int64_t const ctas = grad_bias_grid(params, Traits::kTileM, Traits::kTileN).ctas();
    if (params.grad_bias.data == nullptr || ctas == 0) {
      return cudaSuccess;
    }
    if (ctas > kMaxTiles) {
      return cudaErrorInvalidConfiguration;
    }
    constexpr int kBytes = int(sizeof(typename Traits::SharedMemory));
    cudaError_t const error = allow_shared_memory<&grad_bias<Row>>(kBytes, device);
    if (error != cudaSuccess) {
      return error;
    }
    grad_bias<Row><<<unsigned(ctas), Traits::kThreads, kBytes, stream>>>(params);
  }
  return cudaSuccess;
}

}  // namespace cute_attention::sm80
