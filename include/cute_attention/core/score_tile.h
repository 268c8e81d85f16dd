// core/score_tile.h: a thread's scores of one tile, and which query and key each of them is of.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/sequence.h"

namespace cute_attention {

// What acts on scores by their place (masks and ALiBi; later bias and dropout) takes this and
// nothing else. Rows are queries and columns are keys, however the MMA that made the scores holds
// them.
//   Scores  (ROWS, COLS)  this thread's scores, in registers
//   Coords  (ROWS, COLS)  their (row, column) in the tile of kTileM x kTileN
template <int kTileRows, int kTileCols, class Scores, class Coords>
struct ScoreTile {
  static constexpr int kTileM = kTileRows;
  static constexpr int kTileN = kTileCols;
  static constexpr int kRows = decltype(cute::size<0>(typename Scores::layout_type{}))::value;
  static constexpr int kCols = decltype(cute::size<1>(typename Scores::layout_type{}))::value;
  static_assert(decltype(cute::size<0>(typename Coords::layout_type{}))::value == kRows &&
                    decltype(cute::size<1>(typename Coords::layout_type{}))::value == kCols,
                "every score has its coordinates");

  Scores scores;
  Coords coords;
  Sequence const& sequence;
  QueryPacking const& packing;  // how rows hold queries
  int32_t m_begin;              // the query of row 0
  int32_t n_begin;              // the key of column 0

  // The query of one of the thread's rows.
  CUTE_DEVICE int32_t query(int row) const {
    return m_begin + packing.query(int32_t(cute::get<0>(coords(row, 0))));
  }
  // The key of the thread's first column.
  CUTE_DEVICE int32_t first_key(int row) const {
    return n_begin + int32_t(cute::get<1>(coords(row, 0)));
  }
  // How many keys one of the thread's columns lies behind its first: a constant of the compiler.
  CUTE_DEVICE int32_t keys_behind_first(int row, int col) const {
    return int32_t(cute::get<1>(coords(row, col))) - int32_t(cute::get<1>(coords(row, 0)));
  }
};

// The scores of an accumulator of S = Q K^T.
//   tSrS     (MMA, MMA_M, MMA_N)  this thread's part of it
//   thread   of those that share the MMA; opaque() where coordinates are to be computed in place
//   m_begin  the query of the tile's row 0, n_begin the key of its column 0
template <int kTileM, int kTileN, class TiledMma, class Accumulator>
CUTE_DEVICE auto make_score_tile(TiledMma const& mma, int thread, Accumulator& tSrS,
                                 Sequence const& sequence, QueryPacking const& packing,
                                 int32_t m_begin, int32_t n_begin) {
  using namespace cute;
  Tensor cS = make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{});  // (M, N)
  Tensor tScS = mma.get_slice(thread).partition_C(cS);                  // (MMA, MMA_M, MMA_N)
  CUTE_STATIC_ASSERT_V(shape(tScS) == shape(tSrS));
  Tensor rS = make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));  // (ROWS, COLS)
  Tensor rC = make_tensor(tScS.data(), rows_and_columns(tScS.layout()));  // (ROWS, COLS)
  return ScoreTile<kTileM, kTileN, decltype(rS), decltype(rC)>{rS,      rC,      sequence,
                                                               packing, m_begin, n_begin};
}

// The same scores where the MMA computes S^T = K Q^T: its columns are the tile's rows.
//   tSrS  (MMA, MMA_N, MMA_M)  this thread's part of S^T
template <int kTileM, int kTileN, class TiledMma, class Accumulator>
CUTE_DEVICE auto make_score_tile_of_transpose(TiledMma const& mma, int thread, Accumulator& tSrS,
                                              Sequence const& sequence, QueryPacking const& packing,
                                              int32_t m_begin, int32_t n_begin) {
  using namespace cute;
  Tensor cS = make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{});  // (M, N)
  Tensor cSt = make_tensor(cS.data(), select<1, 0>(cS.layout()));       // (N, M) of (row, column)
  Tensor tScS = mma.get_slice(thread).partition_C(cSt);                 // (MMA, MMA_N, MMA_M)
  CUTE_STATIC_ASSERT_V(shape(tScS) == shape(tSrS));
  auto const columns_and_rows = [](auto const& layout) {
    return select<1, 0>(rows_and_columns(layout));
  };
  Tensor rS = make_tensor(tSrS.data(), columns_and_rows(tSrS.layout()));  // (ROWS, COLS)
  Tensor rC = make_tensor(tScS.data(), columns_and_rows(tScS.layout()));  // (ROWS, COLS)
  return ScoreTile<kTileM, kTileN, decltype(rS), decltype(rC)>{rS,      rC,      sequence,
                                                               packing, m_begin, n_begin};
}

// Those of a thread's scores of a tile that are in kCols columns, from `col` on.
//   n_begin  the key of column 0 of the tile
template <int kCols, class Tile>
CUTE_DEVICE auto columns_of_scores(Tile const& tile, int col, int32_t n_begin) {
  using namespace cute;
  auto const part = make_tile(Layout<Int<Tile::kRows>>{}, Layout<Int<kCols>>{});
  Tensor rS =  // (ROWS, COLS)
      make_tensor(tile.scores.data() + tile.scores.layout()(0, col),
                  composition(tile.scores.layout(), part));
  Tensor rC =  // (ROWS, COLS)
      make_tensor(tile.coords.data() + tile.coords.layout()(0, col),
                  composition(tile.coords.layout(), part));
  return ScoreTile<Tile::kTileM, Tile::kTileN, decltype(rS), decltype(rC)>{
      rS, rC, tile.sequence, tile.packing, tile.m_begin, n_begin};
}

// Copies of scores of a tile, in a few registers: those of the thread's rows and columns from
// (row, col) on, kRows x kCols.
//   copies  in the order of the accumulator
template <int kRows, int kCols, class Tile, class Copies>
CUTE_DEVICE auto copies_of_scores(Tile const& tile, int row, int col, Copies& copies) {
  using namespace cute;
  auto const part = make_tile(Layout<Int<kRows>>{}, Layout<Int<kCols>>{});
  Tensor rS = make_tensor(copies.data(), composition(tile.scores.layout(), part));  // (ROWS, COLS)
  Tensor rC =                                                                       // (ROWS, COLS)
      make_tensor(tile.coords.data() + tile.coords.layout()(row, col),
                  composition(tile.coords.layout(), part));
  CUTE_STATIC_ASSERT_V(cosize(rS.layout()) == size(copies), "they lie side by side");
  CUTE_UNROLL
  for (int i = 0; i < kRows * kCols; ++i) {
    rS(i % kRows, i / kRows) = tile.scores(row + i % kRows, col + i / kRows);
  }
  return ScoreTile<Tile::kTileM, Tile::kTileN, decltype(rS), decltype(rC)>{
      rS, rC, tile.sequence, tile.packing, tile.m_begin, tile.n_begin};
}

}  // namespace cute_attention
