// core/alibi.h: ALiBi (Press, Smith and Lewis, "Train Short, Test Long", 2022): adds
// -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j. Each head has a slope.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/config.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

template <class Params>
CUTE_DEVICE float alibi_slope(Params const& params, int32_t batch, int32_t head) {
  AlibiSlopes const& slopes = params.alibi_slopes;
  return slopes.data[batch * slopes.batch_stride + head * slopes.head_stride];
}

// A modifier of scores (score_mod.h).
//   kShares  whether rows of one head share distances, which takes registers
template <bool kShares>
struct AlibiTermOf {
  static constexpr uint32_t kBit = score_mods::Alibi;
  static constexpr bool kIsMap = false;
  static constexpr bool kInExponent = true;  // the backward adds it to exponents of P

  template <class Params>
  CUTE_DEVICE AlibiTermOf(Params const&, float) {}

  template <class Params>
  CUTE_DEVICE static float unit_after(Params const&, float unit) {
    return unit;
  }

  // The slopes of a thread's rows, in a unit of scores.
  template <int kRows>
  struct OfRows {
    float slopes[kRows];

    // head(row) has row `row`.
    template <class Params, class Head>
    CUTE_DEVICE void load(Params const& params, int32_t batch, Head const& head, float unit) {
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        slopes[row] = alibi_slope(params, batch, head(row)) / unit;
      }
    }
  };

  // The distances of a thread's scores in a tile whose rows are queries one after the other. A
  // query 8 rows on and a key 8 columns on have the distance of the first ones, so that two rows of
  // a thread share most of theirs.
  template <class Tile>
  struct Distances {
    decltype(Tile::coords) coords;  // (ROWS, COLS)
    float first;                    // the thread's first query less its first key, with its sign

    CUTE_DEVICE explicit Distances(Tile const& tile)
        : coords(tile.coords),
          first(float(tile.query(0) + tile.sequence.seqlen_k - tile.sequence.seqlen_q -
                      tile.first_key(0))) {}

    // How far query `row` and key `col` lie behind the first ones are constants of the compiler.
    CUTE_DEVICE float of(int row, int col) const {
      using namespace cute;
      int const query = int(get<0>(coords(row, 0))) - int(get<0>(coords(0, 0)));
      int const key = int(get<1>(coords(0, col))) - int(get<1>(coords(0, 0)));
      return fabsf(first + float(query - key));
    }
  };

  // Adds its terms to the scores of a tile: an FFMA a score, which takes the magnitude of an
  // operand for nothing, and a subtraction a score, or for two where rows are of one head.
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add(Params const&, Tile const& tile, OfRows<Tile::kRows> const& rows) {
    // With more rows in a thread, as on sm80, shared distances were spilled.
    if (kShares && Tile::kRows == 2 && tile.packing.shift == 0) {
      add_slopes(tile, rows, [distances = Distances<Tile>(tile)](int row, int col) {
        return distances.of(row, col);
      });
    } else {
      int32_t const diagonal = tile.sequence.seqlen_k - tile.sequence.seqlen_q;
      add_slopes(tile, rows, [&](int row, int col) {
        float const to_first = float(tile.query(row) + diagonal - tile.first_key(row));
        return fabsf(to_first - float(tile.keys_behind_first(row, col)));
      });
    }
  }

  // What a step of the backward needs to know of the head of its queries.
  struct OfHead {
    float slope;
  };
  template <class Params>
  CUTE_DEVICE static OfHead of_head(Params const& params, int32_t batch, int32_t head) {
    return {alibi_slope(params, batch, head)};
  }

  // Adds its terms to scores of one head, in the backward of rows that have another term too.
  //   unit  of the scores
  template <class Element, class Params, class Tile>
  CUTE_DEVICE static void add_of_head(Params const&, Tile const& tile, OfHead const& head,
                                      float unit) {
    float const slope = head.slope / unit;
    Distances<Tile> const distances(tile);
    CUTE_UNROLL
    for (int row = 0; row < Tile::kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < Tile::kCols; ++col) {
        tile.scores(row, col) = fmaf(-slope, distances.of(row, col), tile.scores(row, col));
      }
    }
  }

  // What it adds, in base 2, to the exponents of a thread's scores in one step of the backward.
  template <class Tile>
  struct OfStep {
    Distances<Tile> distances;
    float slope_log2;

    CUTE_DEVICE OfStep(Tile const& tile, OfHead const& head)
        : distances(tile), slope_log2(head.slope * float(M_LOG2E)) {}

    // For the thread's query `row`, a function that returns the term of its key `col`.
    CUTE_DEVICE auto of_query(int row) const {
      return [this, row](int col) { return -slope_log2 * distances.of(row, col); };
    }
  };

 private:
  // Column after column, so that few distances are in registers.
  //   distance(row, col)  of a score
  template <class Tile, class Distance>
  CUTE_DEVICE static void add_slopes(Tile const& tile, OfRows<Tile::kRows> const& rows,
                                     Distance const& distance) {
    CUTE_UNROLL
    for (int col = 0; col < Tile::kCols; ++col) {
      CUTE_UNROLL
      for (int row = 0; row < Tile::kRows; ++row) {
        tile.scores(row, col) = fmaf(-rows.slopes[row], distance(row, col), tile.scores(row, col));
      }
    }
  }
};

using AlibiTerm = AlibiTermOf<true>;

}  // namespace cute_attention
