// sm90/bias_tiles.h: tiles of a bias (core/bias.h) in shared memory, where TMA writes them beside K
// or Q. ldmatrix reads them as WGMMA leaves scores in registers, S or S^T.
//
// A tile has the numbers of tile_m rows of queries and tile_n keys, in swizzled boxes of 64 keys
// (smem_tiles.h): 8 numbers are a vector, and vector v of row r stands where vector v ^ (r % 8)
// would without a swizzle. Where one number serves all queries or all heads, TMA brings the rows
// that differ, and several rows of scores read the same row of the tile.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/tensor.hpp>

#include "cute_attention/config.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/sm90/smem_tiles.h"
#include "cute_attention/sm90/tma_tile.h"
#include "cute_attention/sm90/warpgroup.h"
#include "cute_attention/study.h"

namespace cute_attention::sm90 {

// A row whose kernel reads the bias as core/bias.h does, from global memory: for calls whose bias
// TMA cannot load (bias_map.h).
// Beside the addresses of its loads a consumer has no registers for the tiles of three warpgroups,
// and with other features in the forward none for scores of more than 64 keys; of 32 with every one
// of them where the output has more than 128 columns.
template <class Row>
struct BiasFromGlobal : Row {
  static constexpr int kMostRows = 2 * kWarpgroupM;
  static constexpr int kMostWarps = 3 * kWarpgroupWarps;
  static constexpr bool kHasFewKeys =
      Row::kKey.score_mods != score_mods::Bias && Row::kKey.direction == Direction::Forward;
  static constexpr int kMostKeys = !kHasFewKeys                 ? Row::kConfig.tile_n
                                   : Row::kKey.head_dim_v > 128 ? 32
                                                                : 64;
  static constexpr KernelConfig kConfig = {
      min_of(Row::kConfig.tile_m, kMostRows), min_of(Row::kConfig.tile_n, kMostKeys),
      Row::kConfig.stages, min_of(Row::kConfig.warps, kMostWarps)};
};

}  // namespace cute_attention::sm90

namespace cute_attention {
template <class Row>
struct StudyOf<sm90::BiasFromGlobal<Row>> : StudyOf<Row> {};
}  // namespace cute_attention

namespace cute_attention::sm90 {

// Whether the kernel of a row reads the bias from tiles.
template <class Row>
constexpr bool kBiasTiles = (Row::kKey.score_mods & score_mods::Bias) != 0;
template <class Row>
constexpr bool kBiasTiles<BiasFromGlobal<Row>> = false;

// Columns of a box, and of a vector that a lane gives to ldmatrix.
constexpr int kBiasBox = 64;
constexpr int kBiasVector = 8;
constexpr int kBiasVectors = kBiasBox / kBiasVector;  // of a row of a box

// The tiles of a call. Made on the host (bias_map.h).
struct BiasTiles {
  CUtensorMap map;  // boxes of 64 keys of a tile's rows
  int32_t bytes;    // of a tile
  // 1, or 0 where one number serves all of them: then the map has one.
  int32_t has_batch;
  int32_t has_head;
  int32_t has_row;
  // Row r of scores has row (r & row_mask) >> row_shift of the tile.
  int32_t row_mask;
  int32_t row_shift;

  CUTE_HOST_DEVICE int32_t row(int32_t row_of_scores) const {
    return (row_of_scores & row_mask) >> row_shift;
  }
};

// Their buffer in shared memory, if the kernel has them.
template <bool kHasTiles, class Element, int kRows, int kCols, int kStages>
struct BiasBuffer {};
template <class Element, int kRows, int kCols, int kStages>
struct BiasBuffer<true, Element, kRows, kCols, kStages> {
  static_assert(kCols % kBiasBox == 0, "whole boxes");
  using SmemLayoutBias = SmemTiles<Element, kRows, kCols, kStages, kBiasBox>;  // (M, N, STAGE)
  cute::array_aligned<Element, cute::cosize_v<SmemLayoutBias>, 1024> bias;

  // The tile of a stage, (M, N).
  CUTE_DEVICE Element* bias_tile(uint32_t stage) { return bias.data() + stage * (kRows * kCols); }
};

// Where in a tile of kRows rows a vector begins, in elements.
template <int kRows>
CUTE_HOST_DEVICE constexpr uint32_t bias_offset(uint32_t row, uint32_t vector) {
  constexpr uint32_t kVectors = kBiasVectors;
  return vector / kVectors * (kRows * kBiasBox) + row * kBiasBox +
         (vector % kVectors ^ row % kVectors) * kBiasVector;
}

// Which vectors the threads of a warpgroup give to ldmatrix (PTX ISA, "ldmatrix"), which reads four
// matrices of 8 x 8 numbers: lane l gives row l % 8 of matrix l / 8. So the four words that a
// thread gets are of eight numbers of its accumulator that follow each other, in the order of
//
//   S    rows 0-7 and 8-15 of keys 0-7, then of keys 8-15
//   S^T  keys 0-7 and 8-15 of queries 0-7, then of queries 8-15; ldmatrix transposes
//
// `step` counts 16 keys of S, or 16 queries of S^T. offset() is bias_offset() of the vector of a
// step, from `first`, that of step 0, by one instruction or two instead of eight.
struct BiasOfScores {
  CUTE_HOST_DEVICE static constexpr int row(int thread, int) {
    return thread / 32 * 16 + thread % 16;
  }
  CUTE_HOST_DEVICE static constexpr int vector(int thread, int step) {
    return 2 * step ^ thread / 16 % 2;
  }
  // The vector of step 0 is the first or the second of its row.
  template <int kRows>
  CUTE_HOST_DEVICE static constexpr uint32_t offset(BiasTiles const&, uint32_t first, int step) {
    return (first ^ 2 * step % kBiasVectors * kBiasVector) +
           2 * step / kBiasVectors * (kRows * kBiasBox);
  }
};
struct BiasOfTranspose {
  CUTE_HOST_DEVICE static constexpr int row(int thread, int step) {
    return 16 * step + thread / 16 % 2 * 8 + thread % 8;
  }
  CUTE_HOST_DEVICE static constexpr int vector(int thread, int) {
    return thread / 32 * 2 + thread / 8 % 2;
  }
  // A tile of the backward is of one head: its rows are queries, or one row for all of them. The
  // swizzle is the same 16 rows on.
  template <int kRows>
  CUTE_HOST_DEVICE static constexpr uint32_t offset(BiasTiles const& bias, uint32_t first,
                                                    int step) {
    return first + uint32_t(bias.row(16 * step) * kBiasBox);
  }
};

// Starts the copy of a tile that begins at `origin`. One thread calls it, before it arrives at
// `full` itself.
template <int kRows, int kCols, class Element>
CUTE_DEVICE void load_bias_tile(BiasTiles const& bias, TileOrigin const& origin, Element* buffer,
                                uint64_t& full) {
  Barrier::expect_transaction(&full, bias.bytes);
  load_boxes<kRows, kCols, kBiasBox>(
      bias.map,
      {origin.batch * bias.has_batch, origin.head * bias.has_head,
       origin.head_of_group * bias.has_head, origin.row * bias.has_row, origin.col},
      0, buffer, full, cute::TMA::CacheHintSm90::EVICT_NORMAL);
}

// What a number of the bias is multiplied by in the unit of scores. A packed sequence may be longer
// than the bias, against the caller's word: its scores become NaN.
template <class Params>
CUTE_DEVICE float bias_per_unit(Params const& params, Sequence const& sequence, float unit) {
  bool const fits = sequence.seqlen_q <= params.seqlen_q && sequence.seqlen_k <= params.seqlen_k;
  return fits ? 1.f / unit : NAN;
}

// Two numbers of 16 bits as floats, in an instruction each: the bits of a bf16 are the upper half
// of those of the float.
template <class Element>
CUTE_DEVICE float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    uint32_t const first = pair << 16, second = pair & 0xffff0000u;
    return {reinterpret_cast<float const&>(first), reinterpret_cast<float const&>(second)};
  } else {
    auto const* const numbers = reinterpret_cast<Element const*>(&pair);
    return {float(numbers[0]), float(numbers[1])};
  }
}

// Adds two numbers to those scores of an accumulator that pair `pair` of them is.
template <class Element, class Accumulator>
CUTE_DEVICE void add_pair(uint32_t numbers, float per_unit, Accumulator&& tSrS, int pair) {
  float2 const two = unpack<Element>(numbers);
  tSrS(2 * pair) = fmaf(two.x, per_unit, tSrS(2 * pair));
  tSrS(2 * pair + 1) = fmaf(two.y, per_unit, tSrS(2 * pair + 1));
}

// Numbers that ldmatrix gives a thread.
constexpr int kBiasNumbers = 8;

// Where in a tile of the bias the vector begins that a thread gives to ldmatrix in step 0 of
// `Vectors`.
//   Vectors    BiasOfScores or BiasOfTranspose
//   kRows      of the tile
//   first_row  the row of scores of row 0 of `Vectors`
//   thread     of those whose accumulators make up the tile's keys; opaque()
template <class Vectors, int kRows>
CUTE_HOST_DEVICE uint32_t first_bias_offset(BiasTiles const& bias, int first_row, int thread) {
  return bias_offset<kRows>(bias.row(first_row + Vectors::row(thread, 0)),
                            Vectors::vector(thread, 0));
}

// Adds those numbers of a tile of the bias that are of the scores of a step of `Vectors`.
//   first   first_bias_offset()
//   scores  (8)
template <class Vectors, int kRows, class Element, class Scores>
CUTE_DEVICE void add_bias_step(BiasTiles const& bias, Element const* tile, uint32_t first,
                               float per_unit, int step, Scores&& scores) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size(scores) == Int<kBiasNumbers>{});
  auto const& vector = *reinterpret_cast<uint128_t const*>(
      tile + Vectors::template offset<kRows>(bias, first, step));
  Tensor words = make_tensor<uint32_t>(Int<4>{});  // (4)
  if constexpr (std::is_same_v<Vectors, BiasOfScores>) {
    SM75_U32x4_LDSM_N::copy(vector, words(0), words(1), words(2), words(3));
  } else {
    SM75_U16x8_LDSM_T::copy(vector, words(0), words(1), words(2), words(3));
  }
  CUTE_UNROLL
  for (int i = 0; i < size(words); ++i) {
    add_pair<Element>(words(i), per_unit, scores, i);
  }
}

// Adds a tile of the bias to scores; arguments as above.
//   tSrS  (MMA, MMA_M, MMA_N)  S, or (MMA, MMA_N, MMA_M) S^T
template <class Vectors, int kRows, class Element, class Accumulator>
CUTE_DEVICE void add_bias_tile(BiasTiles const& bias, Element const* tile, int first_row,
                               int thread, float per_unit, Accumulator& tSrS) {
  using namespace cute;
  uint32_t const first = first_bias_offset<Vectors, kRows>(bias, first_row, thread);
  CUTE_UNROLL
  for (int step = 0; step < size(tSrS) / kBiasNumbers; ++step) {
    add_bias_step<Vectors, kRows>(
        bias, tile, first, per_unit, step,
        make_tensor(tSrS.data() + kBiasNumbers * step, Int<kBiasNumbers>{}));
  }
}

}  // namespace cute_attention::sm90
