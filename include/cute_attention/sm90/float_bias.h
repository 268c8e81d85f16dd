// sm90/float_bias.h: tiles of a bias in fp32 (bias_tiles.h), which is added as it is.
//
// To TMA a number is two columns of 16 bits, so a box of 128 bytes has 32 keys: for each row of
// the tile four groups of 8 keys, two vectors of 16 bytes each. Vector v of row r stands where
// vector v ^ (r % 8) would without a swizzle.
#pragma once

#include "cute_attention/sm90/bias_tiles.h"

namespace cute_attention::sm90 {

// A row whose kernel reads a bias in fp32 from tiles. Their numbers take twice the bytes. So in the
// forward it has half the keys of the row in a tile, and as many stages as fit; in the backward one
// tile for each warpgroup (warpgroup_bias.h), with steps of 64 queries: of more it does not fit.
template <class Row>
struct FloatBias : Row {
  static constexpr int kKeys = Row::kConfig.tile_n / 2;
  static constexpr int kBytesOfStage = kKeys * (2 * (Row::kKey.head_dim + Row::kKey.head_dim_v) +
                                                int(sizeof(float)) * Row::kConfig.tile_m);
  static constexpr int kBytesOfQueries = 2 * Row::kConfig.tile_m * Row::kKey.head_dim;
  static constexpr int kBytesOfBarriers = 2048;
  static constexpr int kStages =
      (max_shared_memory(Row::kKey.arch) - kBytesOfQueries - kBytesOfBarriers) / kBytesOfStage;
  static constexpr KernelConfig kConfig =
      Row::kKey.direction == Direction::Forward
          ? KernelConfig{Row::kConfig.tile_m, kKeys, kStages, Row::kConfig.warps}
          : Row::kConfig;
};

// Whether a row has that kernel. Those of every combination, which take the compiler longest, read
// such a bias from global memory.
template <class Row>
constexpr bool kHasFloatBias = !serves_subsets(Row::kKey.score_mods);

// How many columns of 16 bits a number of the bias has in the tiles of a row's kernel.
template <class Row>
constexpr int kColumnsOfNumber = 1;
template <class Row>
constexpr int kColumnsOfNumber<FloatBias<Row>> = 2;

}  // namespace cute_attention::sm90

namespace cute_attention {
template <class Row>
struct StudyOf<sm90::FloatBias<Row>> : StudyOf<Row> {};
}  // namespace cute_attention

namespace cute_attention::sm90 {

// Where in a tile the numbers lie of those scores that a thread has in two rows of its accumulator,
// 8 apart: of each 8 keys two side by side.
//
// Loads of 8 bytes are served 16 lanes at a time: two groups of 8 keys each of rows r, r + 1, r + 2
// and r + 3. A swizzle leaves the same group of rows r and r + 1, r even, in the same banks. So
// lanes whose row is odd read groups in another order, 2 3 0 1.
struct FloatBiasOfScores {
  static constexpr int kKeys = 32;               // of a box
  static constexpr int kGroup = 8, kGroups = 4;  // keys of a group, groups of a row of a box
  static constexpr int kVector = 4;              // numbers of a vector

  // The row of scores of row `half` of a thread.
  CUTE_HOST_DEVICE static constexpr int row(int thread, int half) {
    return thread / 32 * 16 + half * 8 + thread % 32 / 4;
  }

  CUTE_HOST_DEVICE static constexpr bool other_order(uint32_t row_of_tile) {
    return row_of_tile % 2 != 0;
  }
  // Which group a thread reads in step `step` of a box.
  CUTE_HOST_DEVICE static constexpr int group(uint32_t row_of_tile, int step) {
    return step ^ (other_order(row_of_tile) ? kGroups / 2 : 0);
  }

  // Where in the first box the numbers begin that a thread reads in step 0, and in another step of
  // another box, in floats.
  CUTE_HOST_DEVICE static constexpr uint32_t first(uint32_t row_of_tile, int thread) {
    uint32_t const vector = 2 * group(row_of_tile, 0) + thread % 4 / 2;
    return row_of_tile * kKeys + (vector ^ row_of_tile % 8) * kVector + thread % 2 * 2;
  }
  template <int kRows>
  CUTE_HOST_DEVICE static constexpr uint32_t offset(uint32_t first, int box, int step) {
    return (first ^ step * kGroup) + box * (kRows * kKeys);
  }
};

// Adds a tile of the bias to scores.
//   kRows      of the tile
//   tile       (M, N)
//   first_row  the row of scores of row 0 of the accumulator
//   thread     of the warpgroup; opaque()
//   per_unit   bias_per_unit()
//   tSrS       (MMA, MMA_M, MMA_N)  S
template <int kRows, class Accumulator>
CUTE_DEVICE void add_float_bias_tile(BiasTiles const& bias, float const* tile, int first_row,
                                     int thread, float per_unit, Accumulator& tSrS) {
  using Of = FloatBiasOfScores;
  constexpr int kNumbersOfGroup = 4;  // in two rows of a thread
  constexpr int kBoxes = decltype(cute::size(tSrS))::value / (kNumbersOfGroup * Of::kGroups);
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t const row = bias.row(first_row + Of::row(thread, half));
    bool const swap = Of::other_order(row);
    uint32_t const first = Of::first(row, thread);
    CUTE_UNROLL
    for (int box = 0; box < kBoxes; ++box) {
      CUTE_UNROLL
      for (int step = 0; step < Of::kGroups / 2; ++step) {
        auto const numbers = [&](int step) {
          return *reinterpret_cast<float2 const*>(tile +
                                                  Of::template offset<kRows>(first, box, step));
        };
        float2 const one = numbers(step), other = numbers(step + Of::kGroups / 2);
        auto const add = [&](int group, int i, float number) {
          float& score = tSrS(kNumbersOfGroup * (Of::kGroups * box + group) + 2 * half + i);
          score = fmaf(number, per_unit, score);
        };
        add(step, 0, swap ? other.x : one.x);
        add(step, 1, swap ? other.y : one.y);
        add(step + Of::kGroups / 2, 0, swap ? one.x : other.x);
        add(step + Of::kGroups / 2, 1, swap ? one.y : other.y);
      }
    }
  }
}

// Where in a tile of a warpgroup of the backward (warpgroup_bias.h) the numbers lie of the scores
// of a thread, which are of S^T: two keys, 8 apart, of two queries side by side of each 8. The
// lanes of a warp load one number each, of 8 keys of four queries, none of which share banks.
struct FloatBiasOfTranspose {
  using Of = FloatBiasOfScores;
  // The first query of a thread, of each 8.
  CUTE_HOST_DEVICE static constexpr int query(int thread) { return thread % 4 * 2; }

  // Where the number of query `row` of the first 8 and the thread's first key is, in floats, and
  // the one of the key 8 further on.
  template <int kRows>
  CUTE_HOST_DEVICE static constexpr uint32_t first(uint32_t row_of_tile, int thread) {
    int const key = thread / 32 * 16 + thread % 32 / 4;
    uint32_t const vector = key % Of::kKeys / Of::kVector;
    return key / Of::kKeys * (kRows * Of::kKeys) + row_of_tile * Of::kKeys +
           (vector ^ row_of_tile % 8) * Of::kVector + key % Of::kVector;
  }
  CUTE_HOST_DEVICE static constexpr uint32_t next_key(uint32_t first) { return first ^ Of::kGroup; }
};

// Adds those numbers of a tile of the bias that are of a thread's scores of 16 queries.
//   kRows     of the tile
//   tile      (M, N) of a warpgroup
//   thread    of the warpgroup; opaque()
//   step      which 16 queries
//   per_unit  bias_per_unit()
//   scores    (8)
template <int kRows, class Scores>
CUTE_DEVICE void add_float_bias_step(BiasTiles const& bias, float const* tile, int thread, int step,
                                     float per_unit, Scores&& scores) {
  using Of = FloatBiasOfTranspose;
  CUTE_STATIC_ASSERT_V(cute::size(scores) == cute::Int<kBiasNumbers>{});
  CUTE_UNROLL
  for (int side = 0; side < 2; ++side) {  // of two queries
    uint32_t const first = Of::first<kRows>(uint32_t(bias.row(Of::query(thread) + side)), thread);
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {  // of 16 queries
      uint32_t const behind = uint32_t(bias.row(16 * step + 8 * half) * Of::Of::kKeys);
      CUTE_UNROLL
      for (int key = 0; key < 2; ++key) {
        float& score = scores(4 * half + 2 * key + side);
        score = fmaf(tile[(key == 0 ? first : Of::next_key(first)) + behind], per_unit, score);
      }
    }
  }
}

}  // namespace cute_attention::sm90
