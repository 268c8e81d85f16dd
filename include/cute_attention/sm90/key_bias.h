// sm90/key_bias.h: a bias (core/bias.h) with the same numbers for all queries, as a mask of keys
// has: [batch, heads, 1, seqlen_k]. It has one number for each key of a tile, and any type and
// layout.
//
// In the forward they lie beside K, in fp32: the lanes of the load warp read and convert them. In
// the backward, where a thread has the scores of two keys, it reads these two itself.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/bias.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/warp.h"
#include "cute_attention/sm90/bias_map.h"

namespace cute_attention::sm90 {

// A row whose kernel reads such a bias. Its shared memory has no tiles of the bias, so the forward
// has more stages, and two buffers of Q.
template <class Row>
struct KeyBias : Row {
  static constexpr int kBytesOfStage =
      Row::kConfig.tile_n * (2 * (Row::kKey.head_dim + Row::kKey.head_dim_v) + int(sizeof(float)));
  static constexpr int kBytesOfQueries = 2 * Row::kConfig.tile_m * Row::kKey.head_dim;
  static constexpr int kBytesOfBarriers = 2048;
  static constexpr int kRoom =
      (max_shared_memory(Row::kKey.arch) - 2 * kBytesOfQueries - kBytesOfBarriers) / kBytesOfStage;
  static constexpr int kMostStages = 4;
  static constexpr KernelConfig kConfig =
      Row::kKey.direction == Direction::Forward
          ? KernelConfig{Row::kConfig.tile_m, Row::kConfig.tile_n,
                         max_of(Row::kConfig.stages, min_of(kRoom, kMostStages)),
                         Row::kConfig.warps}
          : Row::kConfig;
};

// Whether the kernel of a row is that one, and whether a row has it: rows with a bias alone or with
// dropout, as models with padding train. Those of every combination, which take the compiler
// longest, read such a bias as any other.
template <class Row>
constexpr bool kKeyBias = false;
template <class Row>
constexpr bool kKeyBias<KeyBias<Row>> = true;
template <class Row>
constexpr bool kHasKeyBias = (Row::kKey.score_mods & ~score_mods::Dropout) == score_mods::Bias;
template <class Row>
constexpr bool kBiasTiles<KeyBias<Row>> = false;

}  // namespace cute_attention::sm90

namespace cute_attention {
template <class Row>
struct StudyOf<sm90::KeyBias<Row>> : StudyOf<Row> {};
}  // namespace cute_attention

namespace cute_attention::sm90 {

// Whether all rows of a tile of a call have the same bias. `Params` is ForwardParams or
// BackwardParams.
template <class Params>
bool is_key_bias(Params const& params, QueryPacking const& packing) {
  return (params.bias.row_stride == 0 || params.seqlen_q == 1) &&
         (params.bias.head_stride == 0 || packing.shift == 0);
}

// Whether the kernel of this file is the one for a call with a bias. A bias of 16 bits has tiles as
// the other way, where TMA can load it. Against them, NVIDIA H200, bf16, this kernel is
//                     fp32                      16 bits
//   forward, d64      1.27 to 1.45 times faster 1.04 to 1.10
//   forward, d128     1.27 to 1.45              0.94 to 0.95
//   backward          1.08 to 1.17              0.89 to 1.01
// 16 bits that TMA cannot load gain 1.26 to 1.76 in the forward, 1.19 to 1.31 in the backward. Head
// dim 256 was not measured.
template <class Row, class Params>
bool takes_key_bias(Params const& params, QueryPacking const& packing) {
  constexpr bool kAlways = Row::kKey.direction == Direction::Forward && Row::kKey.head_dim <= 64;
  return kHasKeyBias<Row> && is_key_bias(params, packing) && (kAlways || !tma_loads_bias(params));
}

// The number of a key; 0 for keys that the bias does not have.
//   Element  of a bias that is not in fp32
//   data     bias_of_head()
template <class Element, class Params>
CUTE_DEVICE float key_bias_number(Params const& params, void const* data, int32_t key) {
  int64_t const index = int64_t(key) * params.bias.col_stride;
  return key >= params.seqlen_k ? 0.f
         : params.bias.is_float ? static_cast<float const*>(data)[index]
                                : float(static_cast<Element const*>(data)[index]);
}

// The place of a key's number among those of a tile. A thread has the scores of two keys of each 8
// (PTX ISA, "wgmma", accumulators): those of 16 keys lie side by side.
struct KeyBiasPlace {
  static constexpr int kKeys = 16, kNumbers = 4;  // of a load: its keys, and a thread's numbers

  CUTE_HOST_DEVICE static constexpr int of_key(int key) {
    return key / kKeys * kKeys + key % 8 / 2 * kNumbers + key % kKeys / 8 * 2 + key % 2;
  }
  // Where those numbers begin that a thread loads for keys kKeys * step and up.
  CUTE_HOST_DEVICE static constexpr int of_thread(int thread, int step) {
    return step * kKeys + thread % 4 * kNumbers;
  }
};

// Their buffer in shared memory, if the kernel has it.
template <bool kHasNumbers, int kTileN, int kStages>
struct KeyBiasBuffer {};
template <int kTileN, int kStages>
struct KeyBiasBuffer<true, kTileN, kStages> {
  alignas(128) float key_bias[kStages][kTileN];  // in the order of KeyBiasPlace
};

// A lane's numbers of a tile of kTileN keys, on their way to shared memory.
template <int kTileN>
struct KeyBiasNumbers {
  static_assert(kTileN % KeyBiasPlace::kKeys == 0, "whole loads");
  static constexpr int kCount = (kTileN + 31) / 32;
  float numbers[kCount];

  // Starts to load them.
  template <class Element>
  CUTE_DEVICE void load(ForwardParams const& params, int32_t batch, int32_t head, int32_t n_begin) {
    void const* const data = bias_of_head(params, batch, head);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      numbers[i] = key_bias_number<Element>(params, data, n_begin + i * 32 + lane_of_warp());
    }
  }

  // Writes them. The lanes then synchronise, before one of them tells of the tile.
  CUTE_DEVICE void store(float (&shared)[kTileN]) const {
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      int const key = i * 32 + lane_of_warp();
      if (kTileN % 32 == 0 || key < kTileN) {
        shared[KeyBiasPlace::of_key(key)] = numbers[i];
      }
    }
  }
};

// Of a kernel that has none.
template <>
struct KeyBiasNumbers<0> {};

// Adds the numbers of a tile to scores.
//   numbers   (kTileN) in shared memory
//   thread    of the warpgroup; opaque()
//   per_unit  bias_per_unit()
//   tSrS      (MMA, MMA_M, MMA_N)  S
template <class Accumulator>
CUTE_DEVICE void add_key_bias(float const* numbers, int thread, float per_unit, Accumulator& tSrS) {
  using Place = KeyBiasPlace;
  constexpr int kScores = 8;  // of a thread, of the keys of a load: of two rows, keys 0 1 and 8 9
  CUTE_UNROLL
  for (int step = 0; step < cute::size(tSrS) / kScores; ++step) {
    float4 const four = *reinterpret_cast<float4 const*>(numbers + Place::of_thread(thread, step));
    float const of_key[Place::kNumbers] = {four.x, four.y, four.z, four.w};
    CUTE_UNROLL
    for (int i = 0; i < kScores; ++i) {
      float& score = tSrS(kScores * step + i);
      score = fmaf(of_key[i / 4 * 2 + i % 2], per_unit, score);
    }
  }
}

// The numbers of a thread's two keys in a step of the backward, whose scores are S^T.
struct KeyBiasOfStep {
  static constexpr int kKeys = 2;  // 8 apart
  float numbers[kKeys];

  // Starts to load them.
  //   data    bias_of_head() of the step
  //   thread  of those whose accumulators make up the tile's keys; opaque()
  template <class Element>
  CUTE_DEVICE static KeyBiasOfStep load(BackwardParams const& params, void const* data,
                                        int32_t n_begin, int thread) {
    int32_t const key = n_begin + thread / 32 * 16 + thread % 32 / 4;
    return {{key_bias_number<Element>(params, data, key),
             key_bias_number<Element>(params, data, key + 8)}};
  }

  // Adds them to scores (KEYS, QUERIES).
  template <class Scores>
  CUTE_DEVICE void add(float per_unit, Scores&& scores) const {
    CUTE_STATIC_ASSERT_V(cute::size<0>(scores) == cute::Int<kKeys>{});
    CUTE_UNROLL
    for (int query = 0; query < cute::size<1>(scores); ++query) {
      CUTE_UNROLL
      for (int key = 0; key < kKeys; ++key) {
        scores(key, query) = fmaf(numbers[key], per_unit, scores(key, query));
      }
    }
  }
};
// Of a kernel that has none.
struct NoKeyBias {};

}  // namespace cute_attention::sm90
