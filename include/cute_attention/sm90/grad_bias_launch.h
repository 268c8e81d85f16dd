// sm90/grad_bias_launch.h: launches the kernels for the gradient of a bias, of sm90 rows that have
// one.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/grad_bias_launch.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm80/grad_bias_launch.h"
#include "cute_attention/sm90/backward_maps.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/grad_bias_kernel.h"

namespace cute_attention::sm90 {

template <class Row, bool kSums>
__global__ void __launch_bounds__(GradBiasTraits<Row, kSums>::kThreads, 1)
    grad_bias(CUTE_GRID_CONSTANT GradBiasArguments const arguments) {
  using Kernel = GradBiasKernel<Row, kSums>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory));
}

// The launches of a row.
template <class Row>
struct GradBiasKernels {
  using Passes = GradBiasPasses<GradBiasTraits<Row, true>>;

  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    return Passes::workspace(params, device);
  }

  //   next_work  0, in the workspace
  static cudaError_t launch(BackwardParams const& params, int32_t* next_work,
                            DeviceInfo const& device, cudaStream_t stream) {
    return Passes::launch(params, device, stream, [&](GradBiasSchedule const& how, int64_t works) {
      GradBiasArguments arguments{};
      arguments.params = params;
      arguments.schedule = how;
      arguments.works = int32_t(works);
      arguments.next_work = next_work;
      return how.sums ? launch_main<true>(arguments, device, stream)
                      : launch_main<false>(arguments, device, stream);
    });
  }

 private:
  template <bool kSums>
  static cudaError_t launch_main(GradBiasArguments& arguments, DeviceInfo const& device,
                                 cudaStream_t stream) {
    using Traits = GradBiasTraits<Row, kSums>;
    constexpr int kBytes = int(sizeof(typename Traits::SharedMemory));
    BackwardParams const& params = arguments.params;
    cudaError_t error = make_backward_maps<Traits>(arguments);
    arguments.bias_is_aligned = tma_loads_bias(params);
    if (error == cudaSuccess && arguments.bias_is_aligned) {
      error = make_bias_tiles<typename Traits::Element, Traits::kTileM, Traits::kTileN>(
          &arguments.bias, params, unpacked_queries());
    }
    if (error == cudaSuccess) {
      error = allow_shared_memory<&grad_bias<Row, kSums>>(kBytes, device.ordinal);
    }
    if (error == cudaSuccess) {
      int32_t const ctas = min_of(arguments.works, device.multiprocessors);
      grad_bias<Row, kSums><<<unsigned(ctas), Traits::kThreads, kBytes, stream>>>(arguments);
    }
    return error;
  }
};

// Heads of at most 32 have the sm80 kernels for small heads: of a chunk of 64 columns half would be
// nothing, and a visit of theirs is mostly pointwise work, which does not gain by WGMMA.
template <class Row>
struct GradBiasLaunch {
  static constexpr bool kHasBias = (Row::kKey.score_mods & score_mods::Bias) != 0;
  static constexpr bool kServesSmall = Row::kKey.head_dim == 64;

  static int64_t workspace(BackwardParams const& params, DeviceInfo const& device) {
    if constexpr (kHasBias) {
      if (params.grad_bias.data == nullptr) {
        return 0;
      }
      if constexpr (kServesSmall) {
        if (sm80::has_small_heads(params.head_dim, params.head_dim_v)) {
          return SmallHeads::workspace(params, device);
        }
      }
      return GradBiasKernels<Row>::workspace(params, device);
    } else {
      return 0;
    }
  }

  // After the LSE and delta are in `params.delta`. Does nothing where the gradient is not wanted.
  //   next_work  0, in the workspace
  static cudaError_t launch(BackwardParams const& params, int32_t* next_work,
                            DeviceInfo const& device, cudaStream_t stream) {
    if constexpr (kHasBias) {
      if (params.grad_bias.data == nullptr) {
        return cudaSuccess;
      }
      if constexpr (kServesSmall) {
        if (sm80::has_small_heads(params.head_dim, params.head_dim_v)) {
          return SmallHeads::launch(params, device, stream);
        }
      }
      return GradBiasKernels<Row>::launch(params, next_work, device, stream);
    } else {
      return cudaSuccess;
    }
  }

 private:
  using SmallHeads =
      sm80::GradBiasKernels<sm80::GradBiasTraits<Row, max_shared_memory(Arch::Sm90), true>>;
};

}  // namespace cute_attention::sm90
