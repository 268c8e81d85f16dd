// sm90/tile_load.h: the load warp of a forward kernel: its walk over the tiles of queries, and the
// copies of keys, which lie in one tensor or in pages.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cute_attention/sm90/cached_keys.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/page_load.h"
#include "cute_attention/sm90/tile_reader.h"
#include "cute_attention/sm90/tma_tile.h"

namespace cute_attention::sm90 {

// What the load warps of the kernels have in common. `Load` is the class that derives from it; its
// load_tile() loads what a tile of queries with visible keys needs.
template <class Row, class SharedMemory, class Load>
struct TileLoad {
  static constexpr int kTileN = Row::kConfig.tile_n;
  static constexpr bool kReadsCache = sm90::kReadsCache<Row>;

  ForwardArguments const& arguments;
  SharedMemory& shared;
  bool const leader;  // one lane talks to the TMA unit and to the barriers
  TileReader<SharedMemory> tiles;

  CUTE_DEVICE TileLoad(ForwardArguments const& arguments, SharedMemory& shared)
      : arguments(arguments), shared(shared), leader(cute::elect_one_sync()), tiles{shared} {}

  CUTE_DEVICE void run() {
    while (true) {
      ForwardTile const& tile = tiles.wait();
      if (tile.is_end()) {
        return;
      }
      if (tile.sees_keys()) {
        static_cast<Load*>(this)->load_tile(tile);
      } else {
        static_cast<Load*>(this)->want_next();
      }
      tiles.release(leader);
    }
  }

  // Lets the scheduler warp take the next tile from the counter, where tiles are taken from one:
  // the last K of this tile has a buffer now. Had the CTA taken it earlier, it could still be busy
  // with this one while others have nothing left; taken later, the tile would be waited for.
  CUTE_DEVICE void want_next() {
    if constexpr (kTakesTiles<Row>) {
      if (arguments.taken_tiles != nullptr && leader) {
        Barrier::arrive(&shared.next_wanted);
      }
    }
  }

 protected:
  // Where the tiles of Q, and those of K and V come from.
  struct Origins {
    TileOrigin q, kv;
    TileOrigin bias;  // of the first key
  };

  CUTE_DEVICE Origins origins(ForwardTile const& tile) const {
    ForwardParams const& params = arguments.params;
    bool const packed_q = params.cu_seqlens_q != nullptr;
    bool const packed_k = params.cu_seqlens_k != nullptr;
    return {{packed_q ? 0 : tile.work.batch, tile.head_kv, tile.head_of_group,
             int32_t(tile.sequence.row_q) + tile.m_begin},
            {packed_k      ? 0
             : kReadsCache ? cache_row(params, tile.work.batch)
                           : tile.work.batch,
             tile.head_kv, 0, int32_t(tile.sequence.row_k)},
            {tile.work.batch, tile.head_kv, tile.head_of_group, tile.m_begin}};
  }

  // Whether keys lie in pages.
  CUTE_DEVICE bool in_pages() const { return kReadsCache && has_pages(arguments.params); }

  // Where this lane's box of a KV tile lies, where keys lie in pages. It is read before the wait
  // for a buffer, and so is there when the wait is over.
  //   origin  of K and V: its batch is the row of the table
  CUTE_DEVICE PageRow look_up(ForwardTile const& tile, TileOrigin const& origin,
                              int32_t n_block) const {
    return in_pages() ? look_up_box<kTileN>(arguments, tile, origin.batch, n_block * kTileN)
                      : PageRow{};
  }

  // Starts the copies of a KV tile of K or V, from column `origin.col` on.
  template <int kCols, int kBox, class Element>
  CUTE_DEVICE void copy_keys(CUtensorMap const& map, TileOrigin const& origin, int32_t n_block,
                             PageRow const& page, Element* buffer, uint64_t& full) {
    if (in_pages()) {
      load_pages<kTileN, kCols, kBox>(arguments, map, origin, page, buffer, full, leader);
    } else if (leader) {
      Barrier::arrive_and_expect_tx(&full, kTileN * kCols * int(sizeof(Element)));
      load_boxes<kTileN, kCols, kBox>(map, origin, n_block * kTileN, buffer, full,
                                      arguments.keys_hint);
    }
  }

  // The rows of a V tile that are zeros, whatever was loaded: all but [begin, end). They have
  // probability 0, but where sequences are packed or in a cache, the memory behind a sequence may
  // hold NaN, as may the buffer where no page was loaded, and 0 * NaN is NaN.
  CUTE_DEVICE KeyRange rows_with_values(ForwardTile const& tile, int32_t n_block) const {
    if (arguments.params.cu_seqlens_k == nullptr && !kReadsCache) {
      return {0, kTileN};
    }
    int32_t const n_begin = n_block * kTileN;
    return key_rows(tile.sequence, kReadsCache ? tile.first_loaded : n_begin, n_begin, kTileN);
  }

  // Overwrites with zeros the rows of a V tile, which has landed, that must be zeros, and tells the
  // consumers that it is there.
  template <int kCols, int kBox, class Element>
  CUTE_DEVICE void mend(Element* buffer, KeyRange const& rows, uint64_t& full) {
    clear_rows<kTileN, kCols, kBox>(buffer, 0, rows.begin);
    clear_rows<kTileN, kCols, kBox>(buffer, rows.end);
    tell_mended(full, leader);
  }
};

}  // namespace cute_attention::sm90
