// sm80/page_load.h: loads tiles of keys from the pages of a cache.
#pragma once

#include "cute_attention/core/address.h"
#include "cute_attention/core/page_lookup.h"

namespace cute_attention::sm80 {

// Where the keys of a sequence lie: one after the other, or in the pages of a cache.
enum class KeyPlace { Rows, Pages };

// The keys of a tile of queries that begins with query `m_begin`, in pages.
struct PagedKeys {
  ForwardParams const& params;
  Sequence const& sequence;
  int32_t batch;
  int32_t head_kv;
  int32_t m_begin;

  // Starts the copy of tile `n_block` of kTileN keys of K or V. Zeros take the place of keys past
  // the sequence's end, of pages that no query of the tile sees, and of those that do not exist.
  // All threads of a warp call it together.
  //   walk    where it goes (tile_walk.h)
  //   tensor  K or V, [pages, page_size, heads_kv, cols]
  template <int kTileN, class Element, class Walk>
  CUTE_DEVICE void load(Walk& walk, Element const* tensor, Strides const& stride, int n_block,
                        int cols, int thread) const {
    static_assert(kTileN / kPageRows <= 32, "a lane for each box");
    int const n_begin = n_block * kTileN;
    KeyRange const boxes =
        key_boxes(sequence, first_visible_key(sequence, m_begin), n_begin, kTileN, kPageRows);
    PageRow const of_lane = look_up_boxes(params, batch, boxes, n_begin, kPageRows);
    auto const row_at = [&](int row) -> Element const* {
      int const page = __shfl_sync(0xffffffffu, of_lane.page, row / kPageRows);
      int const first = __shfl_sync(0xffffffffu, of_lane.row, row / kPageRows);
      if (n_begin + row >= sequence.seqlen_k || uint32_t(page) >= uint32_t(params.cache.pages)) {
        return nullptr;
      }
      return row_pointer(tensor, stride, page, head_kv, first + row % kPageRows);
    };
    walk.load_rows(row_at, cols, thread);
  }
};

}  // namespace cute_attention::sm80
