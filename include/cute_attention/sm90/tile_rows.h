// sm90/tile_rows.h: which queries the rows of a tile are, and where their results go.
#pragma once

#include "cute_attention/core/address.h"
#include "cute_attention/sm90/forward_tile.h"

namespace cute_attention::sm90 {

// A row of a tile.
struct TileRow {
  bool inside;  // it is a query's
  int32_t head;
  int32_t query;

  CUTE_DEVICE TileRow(ForwardArguments const& arguments, ForwardTile const& tile, int32_t row)
      : query(tile.m_begin + arguments.packing.query(row)) {
    int32_t const head_of_tile = arguments.packing.head(row);
    inside = query < tile.sequence.seqlen_q && head_of_tile < tile.heads;
    head = tile.work.head + head_of_tile;
  }

  // Its number in the LSE.
  CUTE_DEVICE int64_t index(ForwardParams const& params, ForwardTile const& tile) const {
    return lse_index(params, tile.sequence, tile.work.batch, head, query);
  }
};

// Where a row of a tile is stored in global memory.
template <class Element>
struct StoreRow : TileRow {
  Element* o;
  float* lse;  // or null

  // Row `row` of the tile.
  CUTE_DEVICE StoreRow(ForwardArguments const& arguments, ForwardTile const& tile, int32_t row)
      : TileRow(arguments, tile, row) {
    ForwardParams const& params = arguments.params;
    o = row_pointer(static_cast<Element*>(params.o), params.o_stride, tile.work.batch, head,
                    tile.sequence.row_q + query);
    lse = params.lse == nullptr ? nullptr : params.lse + index(params, tile);
  }
};

}  // namespace cute_attention::sm90
