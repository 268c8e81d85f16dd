// core/page_lookup.h: the lanes of a warp look up the pages of a tile of keys together.
#pragma once

#include "cute_attention/core/key_pages.h"
#include "cute_attention/core/warp.h"

namespace cute_attention {

// Where a tile of keys that begins with key `n_begin` lies: lane i gets where its box i of `rows`
// rows begins, and page -1 if that is not one of `boxes`, which are loaded. There are at most 32.
CUTE_DEVICE PageRow look_up_boxes(ForwardParams const& params, int32_t batch, KeyRange const& boxes,
                                  int32_t n_begin, int32_t rows) {
  int32_t const lane = lane_of_warp();
  if (lane < boxes.begin || lane >= boxes.end) {
    return {-1, 0};
  }
  return page_row(params.cache, cache_row(params, batch), n_begin + lane * rows);
}

}  // namespace cute_attention
