// sm90/backward_without_sums.h: launches the sm90 backward of a row that keeps no sums of dQ: one
// kernel computes dK and dV, and another dQ. Both compute S and dP, which makes seven products
// instead of five. But nothing is added in global memory: so the gradients are bitwise the same in
// every run, and there is no kernel that sets sums to zero or reads them.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/backward_passes.h"
#include "cute_attention/core/backward_prepare.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/part_sums.h"
#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm90/backward_maps.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/grad_bias_launch.h"
#include "cute_attention/sm90/grad_kv_kernel.h"
#include "cute_attention/sm90/grad_q_kernel.h"

namespace cute_attention::sm90 {

template <class Row>
__global__ void __launch_bounds__(Row::kConfig.warps * 32, 1)
    grad_kv(CUTE_GRID_CONSTANT BackwardArguments const arguments) {
  using Kernel = GradKvKernel<Row>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory));
}

template <class Row>
__global__ void __launch_bounds__(Row::kConfig.warps * 32, 1)
    grad_q(CUTE_GRID_CONSTANT BackwardArguments const arguments) {
  using Kernel = GradQKernel<Row>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory));
}

// What core/backward_prepare.h is told of these kernels.
template <class Row>
struct PrepareWithoutSums {
  using Element = typename GradQTraits<Row>::Element;
  static constexpr int kTileM = GradQTraits<Row>::kTileM;
  static constexpr int kTileN = GradKvTraits<Row>::kTileN;
  static constexpr int kHeadDim = Row::kKey.head_dim;
  static constexpr int kHeadDimV = Row::kKey.head_dim_v;
  static constexpr int kThreads = 256;
  static constexpr bool kHasSums = false;
  static constexpr bool kPaddedNumbers = true;
  static constexpr bool kLeavesKey = false;
};

// The counters of the blocks of keys, of the tiles of queries, and of the works of the gradient of
// a bias, that CTAs have taken: behind delta and the LSE in the workspace.
constexpr int kCounters = 3;
CUTE_HOST_DEVICE int32_t* counters(BackwardParams const& params) {
  return reinterpret_cast<int32_t*>(params.delta + 2 * numbers_size<true>(params));
}

template <class Row>
__global__ void __launch_bounds__(PrepareWithoutSums<Row>::kThreads)
    prepare_without_sums(CUTE_GRID_CONSTANT BackwardParams const params) {
  if (blockIdx.x == 0 && threadIdx.x < kCounters) {
    counters(params)[threadIdx.x] = 0;
  }
  BackwardPrepare<PrepareWithoutSums<Row>>::run(params, last_first(params, Row::kConfig.tile_m));
}

// dK and dV of blocks of keys that were computed in parts.
template <class Row>
using PartsOf = KeyGradientSums<GradKvTraits<Row>, GradKvTraits<Row>::kSumThreads>;
template <class Row>
__global__ void __launch_bounds__(GradKvTraits<Row>::kSumThreads)
    grad_kv_sum(CUTE_GRID_CONSTANT BackwardParams const params,
                CUTE_GRID_CONSTANT GradSchedule const schedule) {
  PartsOf<Row>::add_up(params, schedule, int32_t(blockIdx.x));
}

// The gradient of the sink of each head, one CTA a head.
constexpr int kSinkThreads = 256;
template <class Row>
__global__ void __launch_bounds__(kSinkThreads)
    grad_sink(CUTE_GRID_CONSTANT BackwardParams const params) {
  extern __shared__ float shared_numbers[];
  write_sink_gradient<kSinkThreads, true>(params, int32_t(blockIdx.x), shared_numbers);
}

template <class Row>
struct BackwardWithoutSums {
  using TraitsKv = GradKvTraits<Row>;
  using TraitsQ = GradQTraits<Row>;
  static constexpr int kThreads = TraitsKv::kThreads;
  static constexpr int kBytesKv = int(sizeof(typename TraitsKv::SharedMemory));
  static constexpr int kBytesQ = int(sizeof(typename TraitsQ::SharedMemory));
  static constexpr int kSharedMemoryBytes = max_of(kBytesKv, kBytesQ);
  using GradBias = GradBiasLaunch<Row>;

  // A WorkspaceFunction (kernel_library.h).
  static void workspace(BackwardParams const* params, DeviceInfo const* device,
                        BackwardWorkspace* sizes) {
    GradShape const shape{TraitsKv::kTileM, TraitsKv::kTileN, TraitsKv::kHeadDim,
                          TraitsKv::kHeadDimV};
    *sizes =
        grad_workspace<true>(*params, shape,
                             most_part_blocks(*params, shape.tile_m, shape.tile_n,
                                              device->multiprocessors, device->l2_bytes, false));
    sizes->delta += kCounters;
    sizes->grad_q_sum = 0;
    sizes->grad_q_turn = 0;
    sizes->grad_bias_parts = GradBias::workspace(*params, *device);
  }

  // A LaunchFunction (kernel_library.h); `params` points to a BackwardParams.
  static int32_t launch(void const* params, LaunchContext const* context) {
    BackwardArguments arguments;
    arguments.params = *static_cast<BackwardParams const*>(params);
    arguments.params.grad_q_turn = nullptr;  // nobody waits for a turn
    BackwardParams const& p = arguments.params;
    auto const stream = static_cast<cudaStream_t>(context->stream);
    int64_t const m_tiles = work_tiles(p, TraitsQ::kTileM);
    int64_t const n_tiles = tile_count(p.seqlen_k, TraitsKv::kTileN, p.heads_kv, p.batch);
    if (m_tiles > kMaxTiles || n_tiles > kMaxTiles) {
      return cudaErrorInvalidConfiguration;
    }
    int32_t const multiprocessors = context->device->multiprocessors;
    int32_t const most_ctas = kOneTile<Row> ? int32_t(kMaxTiles) : multiprocessors;
    // Queries may take half of the L2 cache, as where dQ is summed.
    arguments.schedule =
        make_grad_schedule(p, TraitsKv::kTileM, TraitsKv::kTileN, context->device->l2_bytes / 2,
                           multiprocessors, division(p, *context->device));
    PartSums const sums = PartsOf<Row>::part_sums(arguments.schedule);
    arguments.next_tile = counters(p);
    arguments.lse_log2 = p.delta + numbers_size<true>(p);
    arguments.bias_is_aligned =
        call_has<Row::kKey.score_mods, score_mods::Bias>(p) && tma_loads_bias(p);
    cudaError_t error = make_backward_maps<TraitsKv>(arguments);
    if (error != cudaSuccess) {
      return error;
    }
    int32_t const device = context->device->ordinal;
    error = allow_shared_memory<&grad_kv<Row>>(kBytesKv, device);
    if (error == cudaSuccess) {
      error = allow_shared_memory<&grad_q<Row>>(kBytesQ, device);
    }
    if (error != cudaSuccess) {
      return error;
    }
    if (m_tiles > 0) {
      BackwardParams const passes = params_of_passes(p, TraitsQ::kTileM);
      prepare_without_sums<Row><<<unsigned(work_tiles(passes, TraitsQ::kTileM)),
                                  PrepareWithoutSums<Row>::kThreads, 0, stream>>>(passes);
    } else {
      error = cudaMemsetAsync(arguments.next_tile, 0, kCounters * sizeof(int32_t), stream);
      if (error != cudaSuccess) {
        return error;
      }
    }
    if (n_tiles > 0) {
      int32_t const ctas = min_of(int32_t(arguments.schedule.tiles()), most_ctas);
      grad_kv<Row><<<unsigned(ctas), kThreads, kBytesKv, stream>>>(arguments);
    }
    if (sums.ctas > 0) {
      grad_kv_sum<Row><<<unsigned(sums.ctas), TraitsKv::kSumThreads, 0, stream>>>(p, sums.schedule);
    }
    if (m_tiles > 0) {
      int32_t const ctas = min_of(int32_t(m_tiles), most_ctas);
      grad_q<Row><<<unsigned(ctas), TraitsQ::kThreads, kBytesQ, stream>>>(arguments);
    }
    if (p.grad_sink != nullptr) {
      grad_sink<Row>
          <<<unsigned(p.heads), kSinkThreads, kSinkThreads / 32 * sizeof(float), stream>>>(p);
    }
    error = GradBias::launch(p, counters(p) + 2, *context->device, stream);
    return error == cudaSuccess ? cudaGetLastError() : error;
  }

 private:
  // How the steps of a block of keys are divided. The grid is persistent.
  static BlockDivision division(BackwardParams const& params, DeviceInfo const& device) {
    return grad_division(params, TraitsKv::kTileM, TraitsKv::kTileN, device.multiprocessors,
                         device.l2_bytes, false);
  }
};

}  // namespace cute_attention::sm90
