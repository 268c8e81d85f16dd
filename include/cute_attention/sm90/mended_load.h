// sm90/mended_load.h: loads tiles that may reach past the end of a packed sequence.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cute_attention/sm90/tma_tile.h"

namespace cute_attention::sm90 {

// Loads a tile of which the first `rows` rows belong to the sequence. What TMA finds past the end
// of a tensor are zeros. Past the end of a packed sequence it finds another's rows, which may be
// NaN, and 0 * NaN is NaN: the load warp, whose threads call this together, overwrites them, and
// only then tells that the tile is there.
struct MendedLoad {
  uint64_t& landed;   // where such a tile lands: 1 arrival
  bool const leader;  // one lane talks to the TMA unit and to the barriers
  Ring<1> ring{};

  //   kArrives  whether this arrives at `full`; else the caller does, afterwards
  template <int kRows, int kCols, int kBox = kBoxCols<kCols>, bool kArrives = true, class Element>
  CUTE_DEVICE void load(CUtensorMap const& map, TileOrigin const& origin, int32_t row, int32_t rows,
                        bool packed, Element* buffer, uint64_t& full) {
    bool const mend = packed && rows < kRows;
    uint64_t& arrived = mend ? landed : full;
    if (leader) {
      constexpr int kBytes = kRows * kCols * int(sizeof(Element));
      if (kArrives || mend) {
        Barrier::arrive_and_expect_tx(&arrived, kBytes);
      } else {
        Barrier::expect_transaction(&full, kBytes);
      }
      load_boxes<kRows, kCols, kBox>(map, origin, row, buffer, arrived,
                                     cute::TMA::CacheHintSm90::EVICT_LAST);
    }
    if (mend) {
      Barrier::wait(&landed, ring.parity);
      ring.advance();
      clear_rows<kRows, kCols, kBox>(buffer, rows);
      tell_mended(full, leader && kArrives);
    }
  }
};

}  // namespace cute_attention::sm90
