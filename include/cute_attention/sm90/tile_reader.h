// sm90/tile_reader.h: a warp that reads the tiles of queries which the scheduler warp writes to
// shared memory (forward_schedule.h).
#pragma once

#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/forward_tile.h"

namespace cute_attention::sm90 {

template <class SharedMemory>
struct TileReader {
  SharedMemory& shared;
  Ring<kTileSlots> ring{};

  // The tile that is read, once it is there.
  CUTE_DEVICE ForwardTile const& tile() const { return shared.tiles[ring.stage]; }

  // Waits for the tile; it may be the end.
  CUTE_DEVICE ForwardTile const& wait() const {
    Barrier::wait(&shared.tile_full[ring.stage], ring.parity);
    return tile();
  }

  // Waits for the tile after this one; it may be the end.
  CUTE_DEVICE ForwardTile const& wait_for_next() const {
    auto next = ring;
    next.advance();
    Barrier::wait(&shared.tile_full[next.stage], next.parity);
    return shared.tiles[next.stage];
  }

  // Gives the place of the tile back, and goes on to the next one. The threads of a warp call it
  // together, and one of them, which `arrives`, tells the scheduler warp.
  CUTE_DEVICE void release(bool arrives) {
    __syncwarp();  // all lanes have read it
    if (arrives) {
      Barrier::arrive(&shared.tile_empty[ring.stage]);
    }
    ring.advance();
  }
};

}  // namespace cute_attention::sm90
