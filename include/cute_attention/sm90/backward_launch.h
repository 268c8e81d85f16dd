// sm90/backward_launch.h: launches the sm90 backward kernels of one row.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/backward_passes.h"
#include "cute_attention/core/backward_prepare.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm90/backward_finish.h"
#include "cute_attention/sm90/backward_grad_bias.h"
#include "cute_attention/sm90/backward_kernel.h"
#include "cute_attention/sm90/backward_maps.h"
#include "cute_attention/sm90/backward_states.h"
#include "cute_attention/sm90/backward_without_sums.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/complete_heads.h"
#include "cute_attention/sm90/few_keys.h"
#include "cute_attention/sm90/grad_bias_launch.h"
#include "cute_attention/sm90/key_bias.h"
#include "cute_attention/sm90/steps_of_64.h"

namespace cute_attention::sm90 {

template <class Row, bool kWritesGradQ>
__global__ void __launch_bounds__(Row::kConfig.warps * 32, BackwardTraits<Row>::kCtasOfSm)
    backward(CUTE_GRID_CONSTANT BackwardArguments const arguments) {
  using Kernel = BackwardKernel<Row, kWritesGradQ>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory));
}

// What core/backward_prepare.h is told of the backward kernel. Calls with a leftover key have
// kernels before and after of their own, which need more registers.
template <class Row, bool kLeaves>
struct PrepareTraits {
  using Element = typename BackwardTraits<Row>::Element;
  static constexpr int kTileM = Row::kConfig.tile_m;
  static constexpr int kTileN = Row::kConfig.tile_n;
  static constexpr int kHeadDim = Row::kKey.head_dim;
  static constexpr int kHeadDimV = Row::kKey.head_dim_v;
  static constexpr int kThreads = 256;
  static constexpr bool kHasSums = true;
  static constexpr bool kPaddedNumbers = true;
  static constexpr bool kLeavesKey = kLeaves;
  // Of a block whose sums begin with a store: kSumWritten if the sums have numbers.
  CUTE_DEVICE static void start_states(int32_t* sum_states, int64_t block, int thread,
                                       bool written) {
    constexpr int kParts = BackwardTraits<Row>::kConsumers;
    if (thread < kParts) {
      sum_states[block * kParts + thread] = written ? kSumWritten : kSumNotBegun;
    }
  }
};

template <class Row, bool kLeavesKey>
__global__ void __launch_bounds__(PrepareTraits<Row, kLeavesKey>::kThreads, kLeavesKey ? 2 : 0)
    backward_prepare(CUTE_GRID_CONSTANT BackwardParams const params, int32_t* sum_states,
                     CUTE_GRID_CONSTANT CompleteHeads const heads, float* leftover) {
  if (threadIdx.x == 0) {
    start_kernel_after();  // `backward`, whose CTAs begin where SMs have none of this kernel
  }
  if (blockIdx.x == 0 && threadIdx.x < kCountersWithSums) {
    next_tile(params)[threadIdx.x] = 0;
  }
  WorkTile const work = last_first(params, Row::kConfig.tile_m);
  if constexpr (BackwardTraits<Row>::kCountsHeads && !kLeavesKey) {
    start_heads<BackwardTraits<Row>>(params, heads, work, int(threadIdx.x));
  }
  BackwardPrepare<PrepareTraits<Row, kLeavesKey>>::run(
      params, work, BackwardTraits<Row>::kStoresFirst ? sum_states : nullptr, leftover);
}

template <class Row>
__global__ void __launch_bounds__(ClearGradBias<Row>::kThreads)
    clear_grad_bias(CUTE_GRID_CONSTANT BackwardParams const params) {
  ClearGradBias<Row>::run(params);
}

template <class Row, bool kLeavesKey>
__global__ void __launch_bounds__(BackwardFinish<Row, kLeavesKey>::kThreads, kLeavesKey ? 3 : 0)
    backward_finish(CUTE_GRID_CONSTANT BackwardParams const params,
                    CUTE_GRID_CONSTANT PartSums const sums, int32_t const* sum_states,
                    int32_t const* written, float* leftover) {
  extern __shared__ float shared_numbers[];
  await_kernel_before();  // all that this kernel reads it has written, or the one before it
  BackwardFinish<Row, kLeavesKey>::run(params, sums, sum_states, written, leftover, shared_numbers);
}

// For rows whose accumulators hold dK and dV of 64 keys beside a part of dQ.
template <class Row>
struct BackwardWithSums {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kThreads = Traits::kThreads;
  using Sums = typename BackwardFinish<Row, false>::Sums;
  static constexpr int kFinishThreads = BackwardFinish<Row, false>::kThreads;
  static constexpr int kSharedMemoryBytes = int(sizeof(typename Traits::SharedMemory));
  // Whether kernels of the row read a bias that TMA cannot load as 16 bits, and store dS. Those of
  // a row with steps of 128 queries do not: such calls have steps of 64 (BackwardOfEitherStep).
  static constexpr bool kTakesAnyBias = Traits::kBiasTiles && !kHasStepsOf64<Row>;
  static constexpr bool kMayStoreGradBias = Traits::kStoresGradS && !kHasStepsOf64<Row>;
  // The row of the kernel with tiles of a bias in fp32, of rows that have it.
  static constexpr bool kHasFloatTiles = kTakesAnyBias && kHasFloatBias<Row>;
  using RowOfFloats = std::conditional_t<kHasFloatTiles, FloatBias<Row>, Row>;
  static constexpr int kBytesWithFloats =
      int(sizeof(typename BackwardTraits<RowOfFloats>::SharedMemory));
  // Likewise of the one with numbers of keys.
  using RowOfKeys = std::conditional_t<kHasKeyBias<Row>, KeyBias<Row>, Row>;
  using GradBias = GradBiasLaunch<typename RowOfTable<Row>::Type>;

  // A WorkspaceFunction (kernel_library.h).
  static void workspace(BackwardParams const* params, DeviceInfo const* device,
                        BackwardWorkspace* sizes) {
    BackwardParams p = *params;
    bool const leaves_key = leave_key(p, *device);
    *sizes = grad_workspace<true>(
        p, {Traits::kTileM, Traits::kTileN, Traits::kHeadDim, Traits::kHeadDimV},
        most_part_blocks(p, Traits::kTileM, Traits::kTileN, ctas_at_once(*device), device->l2_bytes,
                         kIsPersistent));
    sizes->delta += kCountersWithSums + count_sum_states<Traits>(p, *device) +
                    count_head_numbers<Traits>(p, *device);
    if (leaves_key) {
      sizes->delta += leftover_key_numbers(p, Traits::kTileM, Traits::kHeadDim + Traits::kHeadDimV);
    }
    sizes->grad_bias_parts = stores_grad_bias<Traits>(p) ? 0 : GradBias::workspace(p, *device);
    if (Traits::kWritesGradQ && keeps_no_sums(*params, Traits::kTileM, Traits::kTileN)) {
      sizes->grad_q_sum = 0;
      sizes->grad_q_turn = 0;
    }
  }

  // A LaunchFunction (kernel_library.h); `params` points to a BackwardParams.
  static int32_t launch(void const* params, LaunchContext const* context) {
    BackwardArguments arguments;
    arguments.params = *static_cast<BackwardParams const*>(params);
    bool const at_once = writes_grad_q(arguments.params);
    if (at_once) {
      arguments.params.grad_q_sum = nullptr;
      arguments.params.grad_q_turn = nullptr;
    }
    bool const leaves_key = leave_key(arguments.params, *context->device);
    BackwardParams const& p = arguments.params;
    auto const stream = static_cast<cudaStream_t>(context->stream);
    BackwardParams const passes = params_of_passes(p, Traits::kTileM);
    int64_t const m_tiles = work_tiles(passes, Traits::kTileM);
    int64_t const n_tiles = tile_count(p.seqlen_k, Traits::kTileN, p.heads_kv, p.batch);
    if (m_tiles > kMaxTiles || n_tiles > kMaxTiles) {
      return cudaErrorInvalidConfiguration;
    }
    // Queries and sums of dQ may take half of the L2 cache; the other half is for K, V and for data
    // that is read or written once.
    arguments.schedule =
        make_grad_schedule(p, Traits::kTileM, Traits::kTileN, context->device->l2_bytes / 2,
                           ctas_at_once(*context->device), division(p, *context->device));
    PartSums const sums = Sums::part_sums(arguments.schedule);
    arguments.next_tile = next_tile(p);
    arguments.lse_log2 = p.delta + numbers_size<true>(p);
    arguments.sum_states = sum_states<Traits>(p, *context->device);
    int32_t* const behind_states =
        next_tile(p) + kCountersWithSums + count_sum_states<Traits>(p, *context->device);
    if (!at_once && !leaves_key && counts_heads<Traits>(p, *context->device)) {
      arguments.complete = complete_heads<Traits>(p, behind_states);
    }
    float* const leftover =
        leaves_key ? reinterpret_cast<float*>(behind_states +
                                              count_head_numbers<Traits>(p, *context->device))
                   : nullptr;
    cudaError_t error = make_backward_maps<Traits>(arguments);
    bool const has_bias = call_has<Row::kKey.score_mods, score_mods::Bias>(p);
    bool const of_keys = takes_key_bias<Row>(p, unpacked_queries());
    bool const floats =
        kHasFloatTiles && !of_keys && has_bias && p.bias.is_float && tma_describes_bias(p);
    bool const bias_from_global = has_bias && !of_keys && !floats && !tma_loads_bias(p);
    if constexpr (Traits::kBiasTiles) {
      if (error == cudaSuccess && has_bias && !of_keys && !bias_from_global) {
        constexpr int kRows = Traits::kTileM;
        constexpr int kKeysOfTile = Traits::kBiasOfWarpgroups ? kWarpgroupM : Traits::kTileN;
        auto* const tiles = &arguments.bias;
        auto const packing = unpacked_queries();
        error = floats ? make_bias_tiles<Element, kRows, kWarpgroupM>(tiles, p, packing)
                       : make_bias_tiles<Element, kRows, kKeysOfTile>(tiles, p, packing);
      }
    }
    arguments.stores_grad_bias = kMayStoreGradBias && n_tiles > 0 && stores_grad_bias<Traits>(p);
    if (error == cudaSuccess && arguments.stores_grad_bias) {
      error = make_grad_bias_map<Traits>(&arguments.map_grad_bias, p);
    }
    if (error != cudaSuccess) {
      return error;
    }
    auto const device = context->device->ordinal;
    int const shared_bytes = floats ? kBytesWithFloats : kSharedMemoryBytes;
    error = at_once            ? allow_shared_memory<kWriter>(shared_bytes, device)
            : of_keys          ? allow_shared_memory<kKeys>(shared_bytes, device)
            : floats           ? allow_shared_memory<kFloatTiles>(shared_bytes, device)
            : bias_from_global ? allow_shared_memory<kOtherBias>(shared_bytes, device)
                               : allow_shared_memory<kAdder>(shared_bytes, device);
    if (error != cudaSuccess) {
      return error;
    }
    if (m_tiles > 0) {
      auto const prepare = leaves_key ? kPrepareLeaving : kPrepare;
      prepare<<<unsigned(m_tiles), kPrepareThreads, 0, stream>>>(passes, arguments.sum_states,
                                                                 arguments.complete, leftover);
    } else {
      error = cudaMemsetAsync(arguments.next_tile, 0, kCountersWithSums * sizeof(int32_t), stream);
      if (error != cudaSuccess) {
        return error;
      }
    }
    if constexpr (kMayStoreGradBias) {
      if (arguments.stores_grad_bias && ClearGradBias<Row>::has_hidden(p)) {
        clear_grad_bias<Row><<<unsigned(m_tiles), ClearGradBias<Row>::kThreads, 0, stream>>>(p);
      }
    }
    if (n_tiles > 0) {
      int32_t const most = Traits::kOneTile ? int32_t(kMaxTiles) : ctas_at_once(*context->device);
      int32_t const ctas = min_of(int32_t(arguments.schedule.tiles()), most);
      auto const kernel = at_once            ? kWriter
                          : of_keys          ? kKeys
                          : floats           ? kFloatTiles
                          : bias_from_global ? kOtherBias
                                             : kAdder;
      // Behind a kernel (backward_load.h).
      bool const begins_early = m_tiles > 0 && (!bias_from_global || kOtherBiasBeginsEarly);
      error = launch_kernel(begins_early, kernel, dim3(unsigned(ctas)), kThreads, shared_bytes,
                            stream, arguments);
    }
    int64_t const of_key = leaves_key ? p.batch * p.heads_kv : 0;
    int64_t const finish_ctas = sums.ctas + of_key + (at_once ? 0 : m_tiles);
    if (error == cudaSuccess && m_tiles > 0 && finish_ctas > 0) {
      bool const begins_early = n_tiles > 0 && !at_once;  // behind one that adds to sums
      error = launch_kernel(begins_early, leaves_key ? kFinishLeaving : kFinish,
                            dim3(unsigned(finish_ctas)), kFinishThreads,
                            kFinishThreads / 32 * int(sizeof(float)), stream, passes, sums,
                            static_cast<int32_t const*>(arguments.sum_states),
                            static_cast<int32_t const*>(arguments.complete.written), leftover);
    }
    if (error == cudaSuccess && !arguments.stores_grad_bias) {
      error = GradBias::launch(p, next_tile(p) + 1, *context->device, stream);
    }
    return error == cudaSuccess ? cudaGetLastError() : error;
  }

 private:
  // The kernel that adds dQ to sums, the same where the bias is of keys, where it is in fp32 and
  // where TMA cannot load it, and the one that writes dQ, of rows that have it. Calls with few keys
  // have no other.
  static constexpr auto kAdder = &backward<Row, kIsFewKeys<Row>>;
  static constexpr auto kKeys = &backward<RowOfKeys, kIsFewKeys<Row>>;
  static constexpr auto kFloatTiles = &backward<RowOfFloats, kIsFewKeys<Row>>;
  using RowOfOtherBias = std::conditional_t<kTakesAnyBias, BiasFromGlobal<Row>, Row>;
  static constexpr bool kOtherBiasBeginsEarly = BackwardTraits<RowOfOtherBias>::kBeginsEarly;
  static constexpr auto kOtherBias = &backward<RowOfOtherBias, kIsFewKeys<Row>>;
  static constexpr auto kPrepare = &backward_prepare<Row, false>;
  static constexpr auto kPrepareLeaving = &backward_prepare<Row, Traits::kMayLeaveKey>;
  static constexpr int kPrepareThreads = PrepareTraits<Row, false>::kThreads;
  static constexpr auto kFinish = &backward_finish<Row, false>;
  static constexpr auto kFinishLeaving = &backward_finish<Row, Traits::kMayLeaveKey>;
  static constexpr auto kWriter = &backward<Row, Traits::kWritesGradQ>;

  // Whether the call has a leftover key, which `params` then counts no more.
  static bool leave_key(BackwardParams& params, DeviceInfo const& device) {
    bool const leaves =
        Traits::kMayLeaveKey && has_leftover_key(params, Traits::kTileN, device.multiprocessors);
    params.seqlen_k -= leaves ? 1 : 0;
    return leaves;
  }

  static bool writes_grad_q(BackwardParams const& params) {
    return Traits::kWritesGradQ && has_one_adder(params, Traits::kTileM, Traits::kTileN);
  }

  static constexpr bool kIsPersistent = !Traits::kOneTile;

  static int32_t ctas_at_once(DeviceInfo const& device) {
    return device.multiprocessors * Traits::kCtasOfSm;
  }

  // How the blocks of keys are divided.
  static BlockDivision division(BackwardParams const& params, DeviceInfo const& device) {
    return grad_division(params, Traits::kTileM, Traits::kTileN, ctas_at_once(device),
                         device.l2_bytes, kIsPersistent);
  }
};

// Makes workspaces as large as others.
inline void enlarge(BackwardWorkspace* sizes, BackwardWorkspace const& others) {
  sizes->delta = max_of(sizes->delta, others.delta);
  sizes->grad_q_sum = max_of(sizes->grad_q_sum, others.grad_q_sum);
  sizes->grad_q_turn = max_of(sizes->grad_q_turn, others.grad_q_turn);
  sizes->grad_kv_parts = max_of(sizes->grad_kv_parts, others.grad_kv_parts);
}

// The launches of a row whose calls with few keys have kernels of their own.
template <class Row>
struct BackwardOfAnyKeys : BackwardWithSums<Row> {
  using OfMany = BackwardWithSums<Row>;
  using OfFew = BackwardWithSums<FewKeys<Row>>;

  // A WorkspaceFunction (kernel_library.h): large enough for either, since it does not see whether
  // the gradient of a sink will be wanted, for which few keys are as many.
  static void workspace(BackwardParams const* params, DeviceInfo const* device,
                        BackwardWorkspace* sizes) {
    OfMany::workspace(params, device, sizes);
    if (has_few_keys(*params)) {
      BackwardWorkspace others{};
      OfFew::workspace(params, device, &others);
      enlarge(sizes, others);
    }
  }

  // A LaunchFunction (kernel_library.h); `params` points to a BackwardParams.
  static int32_t launch(void const* params, LaunchContext const* context) {
    return has_few_keys(*static_cast<BackwardParams const*>(params))
               ? OfFew::launch(params, context)
               : OfMany::launch(params, context);
  }
};

// The launches of a row with steps of 128 queries whose other calls have steps of 64.
template <class Row>
struct BackwardOfEitherStep {
  using Of128 = BackwardWithSums<Row>;
  using Of64 = BackwardWithSums<StepsOf64<Row>>;
  static constexpr int kThreads = Of128::kThreads;
  static constexpr int kSharedMemoryBytes = Of128::kSharedMemoryBytes;

  // A WorkspaceFunction (kernel_library.h): large enough for either, since it does not see where
  // the bias is.
  static void workspace(BackwardParams const* params, DeviceInfo const* device,
                        BackwardWorkspace* sizes) {
    BackwardWorkspace others{};
    Of128::workspace(params, device, &others);
    Of64::workspace(params, device, sizes);  // grad_bias_parts is the same for either
    enlarge(sizes, others);
  }

  // A LaunchFunction (kernel_library.h); `params` points to a BackwardParams.
  static int32_t launch(void const* params, LaunchContext const* context) {
    auto const& p = *static_cast<BackwardParams const*>(params);
    bool const is_readable = takes_key_bias<Row>(p, unpacked_queries()) || tma_loads_bias(p);
    return is_readable && !stores_grad_bias<typename Of64::Traits>(p)
               ? Of128::launch(params, context)
               : Of64::launch(params, context);
  }
};

template <class Row>
using BackwardWithSumsOfRow = std::conditional_t<
    kHasStepsOf64<Row>, BackwardOfEitherStep<Row>,
    std::conditional_t<kHasFewKeys<Row>, BackwardOfAnyKeys<Row>, BackwardWithSums<Row>>>;

template <class Row>
using BackwardLaunch =
    std::conditional_t<kSumsGradQ<Row>, BackwardWithSumsOfRow<Row>, BackwardWithoutSums<Row>>;

}  // namespace cute_attention::sm90
