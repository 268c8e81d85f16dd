// sm90/forward_load.h: the producer warp: TMA loads of Q, K and V, as far ahead as there are
// buffers.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/tma_tile.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardLoad {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kTileN = Traits::kTileN;

  ForwardArguments const& arguments;
  SharedMemory& shared;
  bool const leader;  // one lane talks to the TMA unit and to the barriers
  Ring<Traits::kStages> ring_k{};
  Ring<Traits::kStages> ring_v{};
  Ring<Traits::kStagesQ> ring_q{};
  Ring<kTileSlots> ring_tile{};

  CUTE_DEVICE ForwardLoad(ForwardArguments const& arguments, SharedMemory& shared)
      : arguments(arguments), shared(shared), leader(cute::elect_one_sync()) {}

  // In the order in which the consumers need it: S of the next KV tile comes before O of this one.
  //
  //   K(n)  Q  K(n-1) V(n)  K(n-2) V(n-1)  ...  V(0) | K(n) Q ... of the next tile
  CUTE_DEVICE void run() {
    while (true) {
      Barrier::wait(&shared.tile_full[ring_tile.stage], ring_tile.parity);
      ForwardTile const& tile = shared.tiles[ring_tile.stage];
      if (tile.is_end()) {
        return;
      }
      if (tile.sees_keys()) {
        load_tile(tile);
      }
      __syncwarp();  // all lanes have read it
      if (leader) {
        Barrier::arrive(&shared.tile_empty[ring_tile.stage]);
      }
      ring_tile.advance();
    }
  }

 private:
  // Where the tiles of Q, and those of K and V come from.
  struct Origins {
    TileOrigin q, kv;
    TileOrigin bias;  // of the first key
  };

  CUTE_DEVICE Origins origins(ForwardTile const& tile) const {
    ForwardParams const& params = arguments.params;
    bool const packed_q = params.cu_seqlens_q != nullptr;
    bool const packed_k = params.cu_seqlens_k != nullptr;
    int32_t const head_kv = tile.work.head / arguments.packing.group;
    int32_t const head_of_group = tile.work.head - head_kv * arguments.packing.group;
    return {{packed_q ? 0 : tile.work.batch, head_kv, head_of_group,
             int32_t(tile.sequence.row_q) + tile.m_begin},
            {packed_k ? 0 : tile.work.batch, head_kv, 0, int32_t(tile.sequence.row_k)},
            {tile.work.batch, head_kv, head_of_group, tile.m_begin}};
  }

  CUTE_DEVICE void load_tile(ForwardTile const& tile) {
    Origins const from = origins(tile);
    int32_t const last = tile.kv.end - 1;
    // Where packed, the last KV tile may hold rows of the next sequence.
    bool const packed = arguments.params.cu_seqlens_k != nullptr;
    int32_t const last_rows =
        packed ? min_of(tile.sequence.seqlen_k - last * kTileN, kTileN) : kTileN;
    load_k(from, last);
    load_q(from.q);
    for (int32_t n_block = last - 1; n_block >= tile.kv.begin; --n_block) {
      load_k(from, n_block);
      load_v(from.kv, n_block + 1, n_block + 1 == last ? last_rows : kTileN);
    }
    load_v(from.kv, tile.kv.begin, tile.kv.begin == last ? last_rows : kTileN);
  }

  CUTE_DEVICE void load_q(TileOrigin const& origin) {
    CUTE_UNROLL
    for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
      Barrier::wait(&shared.query_empty[ring_q.stage][warpgroup], ring_q.parity ^ 1);
      if (leader) {
        Element* const buffer = shared.q.data() + (ring_q.stage * Traits::kConsumers + warpgroup) *
                                                      (Traits::kBytesQ / int(sizeof(Element)));
        Barrier::arrive_and_expect_tx(&shared.query_full[ring_q.stage][warpgroup], Traits::kBytesQ);
        load_boxes<kWarpgroupM, Traits::kHeadDim, Traits::kBox>(
            arguments.map_q, origin, arguments.packing.query(warpgroup * kWarpgroupM), buffer,
            shared.query_full[ring_q.stage][warpgroup], cute::TMA::CacheHintSm90::EVICT_FIRST);
      }
    }
    ring_q.advance();
  }

  // K, and the bias of the scores that it gives.
  CUTE_DEVICE void load_k(Origins const& from, int32_t n_block) {
    Barrier::wait(&shared.key_empty[ring_k.stage], ring_k.parity ^ 1);
    if (leader) {
      Element* const buffer =
          shared.k.data() + ring_k.stage * (Traits::kBytesK / int(sizeof(Element)));
      if constexpr (Traits::kBiasTiles) {
        TileOrigin origin = from.bias;
        origin.col = n_block * kTileN;
        load_bias_tile<Traits::kTileM, kTileN>(
            arguments.bias, origin, shared.bias_tile(ring_k.stage), shared.key_full[ring_k.stage]);
      }
      Barrier::arrive_and_expect_tx(&shared.key_full[ring_k.stage], Traits::kBytesK);
      load_boxes<kTileN, Traits::kHeadDim, Traits::kBox>(arguments.map_k, from.kv, n_block * kTileN,
                                                         buffer, shared.key_full[ring_k.stage],
                                                         cute::TMA::CacheHintSm90::EVICT_LAST);
    }
    ring_k.advance();
  }

  // Loads a tile of V of which only the first `rows` rows belong to the sequence. The other rows
  // have probability 0, but the memory behind a sequence may hold NaN, and 0 * NaN is NaN: this
  // warp overwrites them with zeros, and only then tells the consumers that the tile is there.
  CUTE_DEVICE void load_v(TileOrigin const& origin, int32_t n_block, int32_t rows) {
    Element* const buffer =
        shared.v.data() + ring_v.stage * (Traits::kBytesV / int(sizeof(Element)));
    uint64_t* const full = &shared.value_full[ring_v.stage];
    bool const mend = rows < kTileN;
    uint64_t* const landed = mend ? &shared.value_landed : full;
    Barrier::wait(&shared.value_empty[ring_v.stage], ring_v.parity ^ 1);
    if (leader) {
      Barrier::arrive_and_expect_tx(landed, Traits::kBytesV);
      load_boxes<kTileN, Traits::kHeadDimV, Traits::kBoxV>(arguments.map_v, origin,
                                                           n_block * kTileN, buffer, *landed,
                                                           cute::TMA::CacheHintSm90::EVICT_LAST);
    }
    if (mend) {
      Barrier::wait(landed, ring_landed.parity);
      ring_landed.advance();
      clear_rows<kTileN, Traits::kHeadDimV, Traits::kBoxV>(buffer, rows);
      cutlass::arch::fence_view_async_shared();  // before WGMMAs read what these lanes wrote
      __syncwarp();
      if (leader) {
        Barrier::arrive(full);
      }
    }
    ring_v.advance();
  }

  Ring<1> ring_landed{};
};

}  // namespace cute_attention::sm90
