// sm90/backward_launch.h: launches the sm90 backward kernels of one row.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/backward_passes.h"
#include "cute_attention/core/backward_prepare.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm90/backward_finish.h"
#include "cute_attention/sm90/backward_grad_bias.h"
#include "cute_attention/sm90/backward_kernel.h"
#include "cute_attention/sm90/backward_maps.h"
#include "cute_attention/sm90/backward_states.h"
#include "cute_attention/sm90/backward_without_sums.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/grad_bias_launch.h"
#include "cute_attention/sm90/key_bias.h"

namespace cute_attention::sm90 {

template <class Row, bool kWritesGradQ>
__global__ void __launch_bounds__(Row::kConfig.warps * 32, 1)
    backward(CUTE_GRID_CONSTANT BackwardArguments const arguments) {
  using Kernel = BackwardKernel<Row, kWritesGradQ>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory));
}

// What core/backward_prepare.h is told of the backward kernel.
template <class Row>
struct PrepareTraits {
  using Element = typename BackwardTraits<Row>::Element;
  static constexpr int kTileM = Row::kConfig.tile_m;
  static constexpr int kTileN = Row::kConfig.tile_n;
  static constexpr int kHeadDim = Row::kKey.head_dim;
  static constexpr int kHeadDimV = Row::kKey.head_dim_v;
  static constexpr int kThreads = 256;
  static constexpr bool kHasSums = true;
  // Of a block whose sums begin with a store: kSumWritten if the sums have numbers.
  CUTE_DEVICE static void start_states(int32_t* sum_states, int64_t block, int thread,
                                       bool written) {
    constexpr int kParts = BackwardTraits<Row>::kConsumers;
    if (thread < kParts) {
      sum_states[block * kParts + thread] = written ? kSumWritten : kSumNotBegun;
    }
  }
};

template <class Row>
__global__ void __launch_bounds__(PrepareTraits<Row>::kThreads)
    backward_prepare(CUTE_GRID_CONSTANT BackwardParams const params, int32_t* sum_states) {
  if (blockIdx.x == 0 && threadIdx.x < kCountersWithSums) {
    next_tile(params)[threadIdx.x] = 0;
  }
  BackwardPrepare<PrepareTraits<Row>>::run(
      params, last_first(params, Row::kConfig.tile_m),
      BackwardTraits<Row>::kStoresFirst ? sum_states : nullptr);
}

template <class Row>
__global__ void __launch_bounds__(ClearGradBias<Row>::kThreads)
    clear_grad_bias(CUTE_GRID_CONSTANT BackwardParams const params) {
  ClearGradBias<Row>::run(params);
}

template <class Row>
__global__ void __launch_bounds__(BackwardFinish<Row>::kThreads)
    backward_finish(CUTE_GRID_CONSTANT BackwardParams const params,
                    CUTE_GRID_CONSTANT PartSums const sums, int32_t const* sum_states) {
  extern __shared__ float shared_numbers[];
  BackwardFinish<Row>::run(params, sums, sum_states, shared_numbers);
}

// For rows whose accumulators hold dK and dV of 64 keys beside a part of dQ.
template <class Row>
struct BackwardWithSums {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kSharedMemoryBytes = int(sizeof(typename Traits::SharedMemory));
  // Whether the kernel of this row reads a bias of 16 bits from tiles. Only such a row has others
  // for other kinds: with tiles in fp32, which may have other steps and so has launches of its own,
  // with numbers of keys, and with a bias in global memory.
  static constexpr bool kHasTiles = Traits::kBiasTiles && !Traits::kFloatBias;
  static constexpr bool kHasFloatTiles = kHasTiles && kHasFloatBias<Row>;
  static constexpr bool kHasKeys = kHasTiles && kHasKeyBias<Row>;
  using WithFloats = BackwardWithSums<FloatBias<Row>>;
  // The row whose kernels run before and after: one for all kinds of bias with the same steps.
  using Table = typename RowOfTable<Row>::Type;
  using Steps = std::conditional_t<Table::kConfig.tile_m == Row::kConfig.tile_m, Table, Row>;
  using Finish = BackwardFinish<Steps>;
  using Sums = typename Finish::Sums;
  static constexpr int kFinishThreads = Finish::kThreads;
  using GradBias = GradBiasLaunch<Table>;

  // A WorkspaceFunction (kernel_library.h). The pointer to a bias does not say yet which kernel
  // reads it: with a bias in fp32 the workspaces are large enough for either step.
  static void workspace(BackwardParams const* params, DeviceInfo const* device,
                        BackwardWorkspace* sizes) {
    *sizes = grad_workspace(*params,
                            {Traits::kTileM, Traits::kTileN, Traits::kHeadDim, Traits::kHeadDimV},
                            parts(*params, *device));
    sizes->delta += kCountersWithSums;
    if (stores_first<Traits>(*params, *device)) {
      sizes->delta += grad_q_blocks(*params, Traits::kTileM).count() * Traits::kConsumers;
    }
    sizes->grad_bias_parts =
        stores_grad_bias<Traits>(*params) ? 0 : GradBias::workspace(*params, *device);
    if (writes_grad_q(*params)) {
      sizes->grad_q_sum = 0;
      sizes->grad_q_turn = 0;
    }
    if constexpr (kHasFloatTiles) {
      if (params->bias.is_float) {
        BackwardWorkspace floats{};
        WithFloats::workspace(params, device, &floats);
        sizes->delta = max_of(sizes->delta, floats.delta);
        sizes->grad_q_sum = max_of(sizes->grad_q_sum, floats.grad_q_sum);
        sizes->grad_q_turn = max_of(sizes->grad_q_turn, floats.grad_q_turn);
        sizes->grad_kv_parts = max_of(sizes->grad_kv_parts, floats.grad_kv_parts);
      }
    }
  }

  // A LaunchFunction (kernel_library.h); `params` points to a BackwardParams.
  static int32_t launch(void const* params, LaunchContext const* context) {
    BackwardArguments arguments;
    arguments.params = *static_cast<BackwardParams const*>(params);
    bool const has_bias = call_has<Row::kKey.score_mods, score_mods::Bias>(arguments.params);
    bool const of_keys = kHasKeys && takes_key_bias<Row>(arguments.params, unpacked_queries());
    if constexpr (kHasFloatTiles) {
      bool const floats = arguments.params.bias.is_float && tma_describes_bias(arguments.params);
      if (has_bias && floats && !of_keys) {
        return WithFloats::launch(params, context);
      }
    }
    bool const at_once = writes_grad_q(arguments.params);
    if (at_once) {
      arguments.params.grad_q_sum = nullptr;
      arguments.params.grad_q_turn = nullptr;
    }
    BackwardParams const& p = arguments.params;
    auto const stream = static_cast<cudaStream_t>(context->stream);
    int64_t const m_tiles = work_tiles(p, Traits::kTileM);
    int64_t const n_tiles = tile_count(p.seqlen_k, Traits::kTileN, p.heads_kv, p.batch);
    if (m_tiles > kMaxTiles || n_tiles > kMaxTiles) {
      return cudaErrorInvalidConfiguration;
    }
    PartSums const sums =
        Sums::part_sums(p, p.grad_kv_parts == nullptr ? 1 : parts(p, *context->device));
    // Queries and sums of dQ may take half of the L2 cache; the other half is for K, V and for data
    // that is read or written once.
    arguments.schedule =
        make_grad_schedule(p, Traits::kTileM, Traits::kTileN, context->device->l2_bytes / 2,
                           context->device->multiprocessors, sums.parts);
    arguments.next_tile = next_tile(p);
    arguments.sum_states = sum_states<Traits>(p, *context->device);
    cudaError_t error = make_backward_maps<Traits>(arguments);
    bool const bias_from_global = kHasTiles && has_bias && !of_keys && !tma_loads_bias(p);
    if constexpr (Traits::kBiasTiles) {
      if (error == cudaSuccess && has_bias && !of_keys && !bias_from_global) {
        constexpr int kKeysOfTile = Traits::kBiasOfWarpgroups ? kWarpgroupM : Traits::kTileN;
        error = make_bias_tiles<Element, Traits::kTileM, kKeysOfTile>(&arguments.bias, p,
                                                                      unpacked_queries());
      }
    }
    arguments.stores_grad_bias = n_tiles > 0 && stores_grad_bias<Traits>(p);
    if (error == cudaSuccess && arguments.stores_grad_bias) {
      error = make_grad_bias_map<Traits>(&arguments.map_grad_bias, p);
    }
    if (error != cudaSuccess) {
      return error;
    }
    auto const device = context->device->ordinal;
    error = at_once            ? allow_shared_memory<kWriter>(kSharedMemoryBytes, device)
            : of_keys          ? allow_shared_memory<kKeys>(kSharedMemoryBytes, device)
            : bias_from_global ? allow_shared_memory<kOtherBias>(kSharedMemoryBytes, device)
                               : allow_shared_memory<kAdder>(kSharedMemoryBytes, device);
    if (error != cudaSuccess) {
      return error;
    }
    if (m_tiles > 0) {
      backward_prepare<Steps><<<unsigned(m_tiles), PrepareTraits<Steps>::kThreads, 0, stream>>>(
          p, arguments.sum_states);
    } else {
      error = cudaMemsetAsync(arguments.next_tile, 0, kCountersWithSums * sizeof(int32_t), stream);
      if (error != cudaSuccess) {
        return error;
      }
    }
    if constexpr (Traits::kStoresGradS) {
      if (arguments.stores_grad_bias && ClearGradBias<Steps>::has_hidden(p)) {
        clear_grad_bias<Steps><<<unsigned(m_tiles), ClearGradBias<Steps>::kThreads, 0, stream>>>(p);
      }
    }
    if (n_tiles > 0) {
      int32_t const most = Traits::kOneTile ? int32_t(kMaxTiles) : context->device->multiprocessors;
      int32_t const ctas = min_of(int32_t(n_tiles) * sums.parts, most);
      auto const kernel = at_once            ? kWriter
                          : of_keys          ? kKeys
                          : bias_from_global ? kOtherBias
                                             : kAdder;
      kernel<<<unsigned(ctas), kThreads, kSharedMemoryBytes, stream>>>(arguments);
    }
    int64_t const finish_ctas = sums.ctas + (at_once ? 0 : m_tiles);
    if (m_tiles > 0 && finish_ctas > 0) {
      backward_finish<Steps>
          <<<unsigned(finish_ctas), kFinishThreads, kFinishThreads / 32 * sizeof(float), stream>>>(
              p, sums, arguments.sum_states);
    }
    if (!arguments.stores_grad_bias) {
      error = GradBias::launch(p, next_tile(p) + 1, *context->device, stream);
    }
    return error == cudaSuccess ? cudaGetLastError() : error;
  }

 private:
  // The kernel that adds dQ to sums, the same where the bias is of keys and where TMA cannot load
  // it, and the one that writes dQ, of rows that have it.
  static constexpr auto kAdder = &backward<Row, false>;
  static constexpr auto kKeys = &backward<std::conditional_t<kHasKeys, KeyBias<Row>, Row>, false>;
  static constexpr auto kOtherBias =
      &backward<std::conditional_t<kHasTiles, BiasFromGlobal<Row>, Row>, false>;
  static constexpr auto kWriter = &backward<Row, Traits::kWritesGradQ>;

  static bool writes_grad_q(BackwardParams const& params) {
    return Traits::kWritesGradQ && has_one_adder(params, Traits::kTileM, Traits::kTileN);
  }

  // Into how many parts the steps of a block of keys are divided. The grid is persistent.
  static int32_t parts(BackwardParams const& params, DeviceInfo const& device) {
    return grad_parts(params, Traits::kTileM, Traits::kTileN, device.multiprocessors);
  }
};

template <class Row>
using BackwardLaunch =
    std::conditional_t<kSumsGradQ<Row>, BackwardWithSums<Row>, BackwardWithoutSums<Row>>;

}  // namespace cute_attention::sm90
