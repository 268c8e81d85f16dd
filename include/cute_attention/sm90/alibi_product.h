// sm90/alibi_product.h: ALiBi (core/alibi.h) by the tensor cores, in the forward.
//
// Where all queries of a warpgroup stand on one side of all keys of a KV tile, the distance of a
// query and a key has no kink. With k0 the first key of the tile, and the sign of the side,
//
//   -slope * |i - j|  =  sign * slope * (j - k0) - sign * slope * (i - k0)
//
// The first term is a product of a number of the row and one of the key, so it is one WGMMA more
// among those of S = Q K^T: A has the slopes, B the places j - k0 of a tile's keys, which are the
// same for all tiles. The second is one number for a row: it is added to the maxima, and taken from
// the bases of the exponents. A score takes no instruction.
//
// A slope stands in A as the sum of three 16-bit numbers, which has the precision of fp32; places
// below 256 have 8 bits. In the tiles of the diagonal, and where a slope of the warp is too large
// for A, A is 0 and the scores get their terms as anywhere else.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>
#include <limits>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/warp.h"
#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/smem_tiles.h"
#include "cute_attention/sm90/warpgroup.h"

namespace cute_attention::sm90 {

// Columns of A and B: the least that a WGMMA has.
constexpr int kPlaceCols = 16;
// Columns of B that have memory of their own: eight of 16 bits are a row of a core matrix (PTX ISA,
// "Asynchronous Warpgroup Level Matrix Shared Memory Layout"). The other columns, for which A is 0,
// lie in the same place.
constexpr int kStoredPlaceCols = 8;
// Parts of a slope, in the first columns of A.
constexpr int kSlopeParts = 3;

// B in shared memory, if the kernel has it.
template <bool kHasPlaces, class Element, int kTileN>
struct KeyPlaces {};
template <class Element, int kTileN>
struct KeyPlaces<true, Element, kTileN> {
  static_assert(kTileN <= 256, "places of 8 bits");
  using SmemLayoutPlaces =  // (N, COLS, 1): rows of 16 bytes, without a swizzle
      cute::Layout<
          cute::Shape<
              cute::Shape<cute::_8, cute::Int<kTileN / 8>>,
              cute::Shape<cute::Int<kStoredPlaceCols>, cute::Int<kPlaceCols / kStoredPlaceCols>>,
              cute::_1>,
          cute::Stride<cute::Stride<cute::Int<kStoredPlaceCols>, cute::Int<8 * kStoredPlaceCols>>,
                       cute::Stride<cute::_1, cute::_0>, cute::_0>>;
  cute::array_aligned<Element, cute::cosize_v<SmemLayoutPlaces>, 16> places;

  // All threads of the CTA call it, before they synchronise.
  CUTE_DEVICE void write_places() {
    auto const sPlaces = in_shared<SmemLayoutPlaces>(places);
    for (int i = threadIdx.x; i < kTileN * kStoredPlaceCols; i += blockDim.x) {
      int const key = i / kStoredPlaceCols, col = i % kStoredPlaceCols;
      sPlaces(key, col, 0) = Element(float(col < kSlopeParts ? key : 0));
    }
    fence_shared_memory();  // before WGMMAs read what these lanes wrote
  }
};

// A, in registers, and what else a thread's two rows need of their slopes.
//   kTileN  keys of a KV tile
template <class Element, int kTileN>
struct AlibiOperand {
  using Fragment = decltype(cute::make_tensor<Element>(  // (MMA, MMA_M, MMA_K)
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::_1>{}));
  // Slopes beyond this, in the unit of scores, might not fit the type of A, or their products fp32.
  static constexpr float kLargest =
      std::is_same_v<Element, cutlass::bfloat16_t> ? 0x1p100f : 0x1p15f;

  Fragment fragment;
  uint32_t parts[2] = {};  // of the rows' slopes: those in this thread's first two columns
  bool serves = false;     // whether A can hold the slopes of the warp
  // KV tiles below `before` lie before all queries of the block, those from `after` on behind them.
  int32_t before = 0, after = 0;
  int32_t diagonal = 0;   // of the first row: the key at the diagonal
  float behind = 0;       // of the second one: how many keys behind it that lies
  int side = 0;           // the sign of the tile; 0 where A is 0
  float offsets[2] = {};  // of the rows: what is to be added to their scores

  // Reads the slopes of a tile of queries.
  //   slopes  of the rows, in the unit of scores
  CUTE_DEVICE void load(float const (&slopes)[2]) {
    int const lane = lane_of_warp() % kThreadsPerRow;
    serves = !DeviceWarp::any(!(fmaxf(fabsf(slopes[0]), fabsf(slopes[1])) <= kLargest));
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      float const slope = serves ? slopes[row] : 0.f;
      float const first = float(Element(slope)), rest = slope - first;
      float const second = float(Element(rest));
      parts[row] = lane == 0   ? pack<Element>(first, second)
                   : lane == 1 ? pack<Element>(rest - second, 0.f)
                               : 0u;
    }
  }

  // For a block of queries whose first one has the diagonal at key `first`. What a KV tile needs to
  // know of it are these four numbers.
  //   of_rows  the keys at the diagonals of this thread's two rows
  CUTE_DEVICE void begin(int first, int const (&of_rows)[2]) {
    int const end = first + kWarpgroupM;
    before = serves && first > 0 ? first / kTileN : 0;
    after = !serves   ? std::numeric_limits<int32_t>::max()
            : end > 0 ? (end + kTileN - 1) / kTileN
                      : 0;
    diagonal = of_rows[0];
    behind = float(of_rows[1] - of_rows[0]);
  }

  // For a KV tile. The distance is a difference of ints: as floats, positions are exact only up to
  // 2^24.
  CUTE_DEVICE void place(int32_t n_block, float const (&slopes)[2]) {
    side = n_block < before ? 1 : n_block >= after ? -1 : 0;
    float const sign = float(side), to_key = float(n_block * kTileN - diagonal);
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      float const slope = side == 0 ? 0.f : sign * slopes[row];
      offsets[row] = slope * (row == 0 ? to_key : to_key - behind);
    }
    write();
  }

  // `offsets` as (ROWS).
  template <class Rows>
  CUTE_DEVICE Rows offsets_of_rows() const {
    Rows of_rows;
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      of_rows(row) = offsets[row];
    }
    return of_rows;
  }

 private:
  CUTE_DEVICE void write() {
    uint32_t* const registers = reinterpret_cast<uint32_t*>(fragment.data());
    uint32_t const sign = side < 0 ? 0x80008000u : 0u, kept = side == 0 ? 0u : ~0u;
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      registers[row] = (parts[row] ^ sign) & kept;
      registers[row + 2] = 0;
    }
  }
};

// In other rows nothing.
struct NoAlibiOperand {};

}  // namespace cute_attention::sm90
