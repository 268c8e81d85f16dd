// sm90/forward_launch.h: launches the sm90 forward kernel of one row.
#pragma once

#include <cuda_runtime.h>

#include "cute_attention/core/call_counters.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/combine_splits.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/split_steps.h"
#include "cute_attention/kernel_library.h"
#include "cute_attention/once_per_device.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/cached_keys.h"
#include "cute_attention/sm90/forward_kernel.h"
#include "cute_attention/sm90/key_bias.h"
#include "cute_attention/sm90/mla_kernel.h"
#include "cute_attention/sm90/tensor_map.h"

namespace cute_attention::sm90 {

// The kernel of a row: one of its own where qv joins the scores.
template <class Row>
using KernelOf =
    std::conditional_t<has_qv(Row::kKey.score_mods), MlaKernel<Row>, ForwardKernel<Row>>;

template <class Row>
__global__ void __launch_bounds__(Row::kConfig.warps * 32, KernelOf<Row>::Traits::kCtasOfSm)
    forward(CUTE_GRID_CONSTANT ForwardArguments const arguments) {
  using Kernel = KernelOf<Row>;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  Kernel::run(arguments, *reinterpret_cast<typename Kernel::SharedMemory*>(shared_memory));
}

template <class Row>
struct ForwardLaunch {
  using Kernel = KernelOf<Row>;
  using Traits = typename Kernel::Traits;
  using Element = typename Traits::Element;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr int kSharedMemoryBytes = int(sizeof(typename Traits::SharedMemory));
  // A CTA asks for one tile more than there are, which 32 bits must be able to count.
  static constexpr bool kOneTile = Traits::Study::kGrid == Grid::OneTile;
  static constexpr int64_t kMostTiles = kOneTile ? kMaxTiles / 2 : kMaxTiles;

  // A LaunchFunction; `params` is a ForwardParams with at least one query.
  static int32_t launch(void const* params, LaunchContext const* context) {
    if constexpr (Traits::kBiasTiles && !Traits::kFloatBias) {
      auto const& call = *static_cast<ForwardParams const*>(params);
      if (call_has<Row::kKey.score_mods, score_mods::Bias>(call)) {
        if constexpr (kHasKeyBias<Row>) {
          if (takes_key_bias<Row>(call, packing_of(call))) {
            return ForwardLaunch<KeyBias<Row>>::launch(params, context);
          }
        }
        if constexpr (kHasFloatBias<Row>) {
          if (call.bias.is_float && tma_describes_bias(call)) {
            return ForwardLaunch<FloatBias<Row>>::launch(params, context);
          }
        }
        if (!tma_loads_bias(call)) {
          return ForwardLaunch<BiasFromGlobal<Row>>::launch(params, context);
        }
      }
    }
    if constexpr (kHasCacheKernel<Row>) {
      if (static_cast<ForwardParams const*>(params)->cache.seqused_k != nullptr) {
        return ForwardLaunch<CachedKeys<Row>>::launch(params, context);
      }
    }
    ForwardArguments arguments;
    arguments.params = *static_cast<ForwardParams const*>(params);
    if (work_tiles(arguments.params, Traits::kTileM) > kMostTiles) {
      return cudaErrorInvalidConfiguration;
    }
    arguments.packing = packing_of(arguments.params);
    cudaError_t error = make_maps(arguments);
    if (error != cudaSuccess) {
      return error;
    }
    error = allow_shared_memory<&forward<Row>>(kSharedMemoryBytes, context->device->ordinal);
    if (error != cudaSuccess) {
      return error;
    }
    int32_t const ctas =
        kOneTile ? int32_t(kMostTiles) : context->device->multiprocessors * Traits::kCtasOfSm;
    arguments.schedule = make_packed_schedule(arguments, ctas, context->device->l2_bytes / 2);
    if constexpr (Traits::kStoresBoxes) {
      describe_output<Traits>(arguments, ctas);
    }
    arguments.by_splits = cutlass::FastDivmod(arguments.params.num_splits);
    arguments.by_parts = cutlass::FastDivmod(arguments.packing.parts);
    arguments.by_page_size = cutlass::FastDivmod(max_of(arguments.params.cache.page_size, 1));
    arguments.keys_hint = keys_hint(arguments);
    if (arguments.schedule.tiles <= ctas) {  // nobody takes a second tile, as in decoding
      arguments.params.next_tile = nullptr;
    }
    if (arguments.params.next_tile != nullptr && arguments.params.cu_seqlens_q != nullptr) {
      error = cudaMemsetAsync(arguments.params.next_tile, 0, sizeof(int32_t),
                              static_cast<cudaStream_t>(context->stream));
      if (error != cudaSuccess) {
        return error;
      }
    }
    arguments.split_arrivals = arrivals_for(arguments, *context);
    arguments.taken_tiles = counter_for(arguments, ctas, *context);
    int32_t const grid = min_of(arguments.schedule.tiles, ctas);
    // A kernel that reads a cache begins while the kernel before it, which may be the one that
    // appends to the cache, still runs: its CTAs set themselves up meanwhile.
    error =
        launch_kernel(kReadsCache<Row>, &forward<Row>, dim3(unsigned(grid)), kThreads,
                      kSharedMemoryBytes, static_cast<cudaStream_t>(context->stream), arguments);
    bool const combines = has_splits(arguments.params) && arguments.split_arrivals == nullptr;
    return error == cudaSuccess && combines
               ? combine_splits(arguments.params, Row::kKey, context->stream)
               : error;
  }

  // A GridFunction (kernel_library.h).
  static ForwardGrid grid(ForwardParams const* params) {
    QueryPacking const packing = packing_of(*params);
    return {packed_tiles(*params, Traits::kTileM, packing) * params->heads_kv,
            packing.queries(Traits::kTileM)};
  }

 private:
  static constexpr int32_t kFetchedCols = 64;  // the 128 bytes that L2 fetches together
  static constexpr double kMostForgottenBytes = 400e6;

  // With dropout the two rows of a thread must be queries of one class (core/dropout.h), which rows
  // of several heads are not.
  static QueryPacking packing_of(ForwardParams const& params) {
    bool const drops = call_has<Row::kKey.score_mods, score_mods::Dropout>(params);
    return make_query_packing(params, Traits::kTileM, drops ? 1 : kWarpgroupM);
  }

  // A schedule of tiles that hold the heads of the packing, and whose keys are divided.
  static Schedule make_packed_schedule(ForwardArguments const& arguments, int32_t ctas,
                                       int64_t l2_bytes) {
    ForwardParams params = arguments.params;
    params.heads = params.heads_kv * arguments.packing.parts * params.num_splits;
    return make_schedule(params, arguments.packing.queries(Traits::kTileM), ctas, l2_bytes);
  }

  // Whether one tile has all queries that see a key, as in decoding.
  static bool reads_keys_once(ForwardArguments const& arguments) {
    return arguments.packing.parts == 1 &&
           arguments.params.seqlen_q <= arguments.packing.queries(Traits::kTileM);
  }

  // Keys that are read once may be forgotten by L2 at once. Steps over 34 to 268 MB took 0.86 to
  // 1.01 of the time so (H100). Over more, where L2 is full of what has to be written, they took
  // 1.01 to 1.05; and where the bytes that L2 fetches together are of two heads, the other head's
  // may be forgotten before they are read.
  static cute::TMA::CacheHintSm90 keys_hint(ForwardArguments const& arguments) {
    ForwardParams const& params = arguments.params;
    int32_t const least_cols = min_of(params.head_dim, params.head_dim_v);
    double const keys = double(params.batch) * params.heads_kv * params.seqlen_k;
    double const bytes = 2 * keys * (double(params.head_dim) + params.head_dim_v);
    return reads_keys_once(arguments) && least_cols >= kFetchedCols && bytes <= kMostForgottenBytes
               ? cute::TMA::CacheHintSm90::EVICT_FIRST
               : cute::TMA::CacheHintSm90::EVICT_LAST;
  }

  // The counters of a call whose last splits combine them all; else null.
  static int32_t* arrivals_for(ForwardArguments const& arguments, LaunchContext const& context) {
    ForwardParams const& params = arguments.params;
    QueryPacking const& packing = arguments.packing;
    int32_t const rows = min_of(params.seqlen_q, packing.queries(kWarpgroupM)) << packing.shift;
    bool const counts = kReadsCache<Row> && has_splits(params) &&
                        last_split_may_combine(Row::kKey, params) &&
                        last_split_combines(rows, params.num_splits, params.head_dim_v);
    int64_t const tiles = arguments.schedule.tiles / params.num_splits;
    return counts
               ? call_counters(tiles * Traits::kConsumers, context.device->ordinal, context.stream)
               : nullptr;
  }

  // The counter of a call whose tiles take different times, where CTAs have several; else null.
  // They do so under a causal mask; with a window, where the first queries of a sequence see fewer
  // keys than the others; and where keys lie in a cache, of which sequences have more or less.
  static uint32_t* counter_for(ForwardArguments const& arguments, int32_t ctas,
                               LaunchContext const& context) {
    ForwardParams const& params = arguments.params;
    bool const counts = Traits::kCountsCausalTiles || arguments.schedule.order != Order::Longest;
    bool const uneven = kReadsCache<Row> || (counts && tiles_differ(params));
    bool const takes = kTakesTiles<Row> && uneven && params.cu_seqlens_q == nullptr &&
                       !has_splits(params) && arguments.schedule.tiles > ctas;
    return takes ? reinterpret_cast<uint32_t*>(
                       call_counters(1, context.device->ordinal, context.stream))
                 : nullptr;
  }

  static cudaError_t make_maps(ForwardArguments& arguments) {
    ForwardParams const& params = arguments.params;
    bool const packed_q = params.cu_seqlens_q != nullptr;
    bool const packed_k = params.cu_seqlens_k != nullptr;
    bool const cached = params.cache.seqused_k != nullptr;
    int64_t const rows_k = cached     ? params.cache.page_size
                           : packed_k ? params.total_k
                                      : params.seqlen_k;
    int64_t const batch_k = cached ? params.cache.pages : packed_k ? 1 : params.batch;
    int32_t const box_rows =
        has_pages(params) ? page_box_rows(params.cache.page_size, Traits::kTileN) : Traits::kTileN;
    arguments.box_rows_k = box_rows;
    TensorView const q{params.q,
                       packed_q ? 1 : params.batch,
                       packed_q ? params.total_q : params.seqlen_q,
                       params.heads,
                       params.head_dim,
                       params.q_stride};
    TensorView k{params.k, batch_k, rows_k, params.heads_kv, params.head_dim, params.k_stride};
    TensorView v{params.v, batch_k, rows_k, params.heads_kv, params.head_dim_v, params.v_stride};
    if (rows_k == 0 ||
        batch_k == 0) {  // a tensor map has a row at least; without keys nobody reads it
      k = v = q;
    }
    QueryPacking const& packing = arguments.packing;
    // With 256 bytes, keys that are read once take up to 1.12 times as long (8 x 8192 to 64 x 16384
    // keys of head dims 128 and 256, H200; 1.00 on an H100), and those of dense calls up to 1.01.
    constexpr CUtensorMapL2promotion fetched = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
    cudaError_t error =
        make_tensor_map<Element>(&arguments.map_q, q, packing.group,
                                 {Traits::kBox, 1 << packing.shift, packing.queries(kWarpgroupM)});
    error = error == cudaSuccess ? make_tensor_map<Element>(&arguments.map_k, k, 1,
                                                            {Traits::kBox, 1, box_rows}, fetched)
                                 : error;
    error = error == cudaSuccess ? make_tensor_map<Element>(&arguments.map_v, v, 1,
                                                            {Traits::kBoxV, 1, box_rows}, fetched)
                                 : error;
    if constexpr (has_qv(Row::kKey.score_mods)) {
      TensorView qv = q;
      qv.data = params.qv;
      qv.cols = params.head_dim_v;
      qv.stride = params.qv_stride;
      error = error == cudaSuccess ? make_tensor_map<Element>(&arguments.map_qv, qv, packing.group,
                                                              {Traits::kBoxV, 1 << packing.shift,
                                                               packing.queries(kWarpgroupM)})
                                   : error;
    }
    if constexpr (Traits::kBiasTiles) {
      if (error == cudaSuccess && call_has<Row::kKey.score_mods, score_mods::Bias>(params)) {
        error = make_bias_tiles<Element, Traits::kTileM, Traits::kTileN>(&arguments.bias, params,
                                                                         packing);
      }
    }
    return error;
  }
};

}  // namespace cute_attention::sm90
