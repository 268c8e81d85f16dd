// sm90/key_bias.h: a bias (core/bias.h) with the same numbers for all queries, as a mask of keys
// has: [batch, heads, 1, seqlen_k]. Beside K lies one number for each of its keys, in fp32,
// whatever type and layout the bias has: the lanes of the load warp read and convert them.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/bias.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/warp.h"
#include "cute_attention/sm90/bias_tiles.h"

namespace cute_attention::sm90 {

// A row whose kernel reads such a bias. Its shared memory has no tiles of the bias, so it has more
// stages, and two buffers of Q.
template <class Row>
struct KeyBias : Row {
  static constexpr int kBytesOfStage =
      Row::kConfig.tile_n * (2 * (Row::kKey.head_dim + Row::kKey.head_dim_v) + int(sizeof(float)));
  static constexpr int kBytesOfQueries = 2 * Row::kConfig.tile_m * Row::kKey.head_dim;
  static constexpr int kBytesOfBarriers = 2048;
  static constexpr int kRoom =
      (max_shared_memory(Row::kKey.arch) - 2 * kBytesOfQueries - kBytesOfBarriers) / kBytesOfStage;
  static constexpr int kMostStages = 4;
  static constexpr KernelConfig kConfig = {Row::kConfig.tile_m, Row::kConfig.tile_n,
                                           max_of(Row::kConfig.stages, min_of(kRoom, kMostStages)),
                                           Row::kConfig.warps};
};

// Whether the kernel of a row is that one, and whether a row has it. Those of every combination,
// which take the compiler longest, read such a bias as any other.
template <class Row>
constexpr bool kKeyBias = false;
template <class Row>
constexpr bool kKeyBias<KeyBias<Row>> = true;
template <class Row>
constexpr bool kHasKeyBias = Row::kKey.score_mods == score_mods::Bias;
template <class Row>
constexpr bool kBiasTiles<KeyBias<Row>> = false;

}  // namespace cute_attention::sm90

namespace cute_attention {
template <class Row>
struct StudyOf<sm90::KeyBias<Row>> : StudyOf<Row> {};
}  // namespace cute_attention

namespace cute_attention::sm90 {

// Whether all rows of a tile of a call have the same bias.
inline bool is_key_bias(ForwardParams const& params, QueryPacking const& packing) {
  return (params.bias.row_stride == 0 || params.seqlen_q == 1) &&
         (params.bias.head_stride == 0 || packing.shift == 0);
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

  // Starts to load them; 0 for keys that the bias does not have.
  template <class Element>
  CUTE_DEVICE void load(ForwardParams const& params, int32_t batch, int32_t head, int32_t n_begin) {
    void const* const data = bias_of_head(params, batch, head);
    CUTE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      int32_t const key = n_begin + i * 32 + lane_of_warp();
      int64_t const index = int64_t(key) * params.bias.col_stride;
      bool const inside = key < params.seqlen_k;
      numbers[i] = !inside                ? 0.f
                   : params.bias.is_float ? static_cast<float const*>(data)[index]
                                          : float(static_cast<Element const*>(data)[index]);
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

}  // namespace cute_attention::sm90
