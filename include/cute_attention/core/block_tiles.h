// core/block_tiles.h: how many tiles of queries the blocks of keys of a backward pass need, as the
// host knows it.
#pragma once

#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention {

// The numbers of tiles of queries of blocks of keys that stand for all blocks, in descending order,
// in a dense call, or in a packed one whose sequences all have the greatest length. Under a mask
// the blocks differ, but slowly from one to the next.
struct BlockTiles {
  static constexpr int32_t kSamples = 16;
  int32_t samples = 0;
  int32_t tiles[kSamples] = {};

  constexpr void insert(int32_t value) {
    int32_t place = samples++;
    for (; place > 0 && tiles[place - 1] < value; --place) {
      tiles[place] = tiles[place - 1];
    }
    tiles[place] = value;
  }
  constexpr bool differ() const { return samples > 0 && tiles[0] != tiles[samples - 1]; }
  constexpr double mean() const {
    double sum = 0;
    for (int32_t i = 0; i < samples; ++i) {
      sum += tiles[i];
    }
    return samples > 0 ? sum / samples : 0;
  }
};
constexpr BlockTiles sample_tiles(BackwardParams const& params, int32_t tile_m, int32_t tile_n) {
  Sequence const sequence = make_sequence(params.seqlen_q, params.seqlen_k, 0, 0,
                                          params.window_left, params.window_right);
  int32_t const n_blocks = ceil_div(params.seqlen_k, tile_n);
  int32_t const samples = min_of(n_blocks, BlockTiles::kSamples);
  BlockTiles found;
  for (int32_t i = 0; i < samples; ++i) {
    int32_t const n_block = int32_t(int64_t(2 * i + 1) * n_blocks / (2 * samples));
    found.insert(m_tiles(sequence, n_block * tile_n, tile_n, tile_m).count());
  }
  return found;
}

}  // namespace cute_attention
