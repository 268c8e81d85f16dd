// sm90/forward_load.h: the producer warp: TMA loads of Q, K and V, as far ahead as there are
// buffers.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cute_attention/core/call_features.h"
#include "cute_attention/sm90/cached_keys.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/page_load.h"
#include "cute_attention/sm90/tma_tile.h"

namespace cute_attention::sm90 {

template <class Row>
struct ForwardLoad {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr bool kReadsCache = sm90::kReadsCache<Row>;

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
            {packed_k      ? 0
             : kReadsCache ? cache_row(params, tile.work.batch)
                           : tile.work.batch,
             head_kv, 0, int32_t(tile.sequence.row_k)},
            {tile.work.batch, head_kv, head_of_group, tile.m_begin}};
  }

  CUTE_DEVICE void load_tile(ForwardTile const& tile) {
    Origins const from = origins(tile);
    int32_t const last = tile.kv.end - 1;
    // One place for each load: what is inlined twice takes twice the instruction cache.
    for (int32_t n_block = last; n_block >= tile.kv.begin - 1; --n_block) {
      if (n_block >= tile.kv.begin) {
        load_k(tile, from, n_block);
      }
      if (n_block == last) {
        load_q(from.q);
      } else {
        load_v(tile, from.kv, n_block + 1);
      }
    }
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

  // Whether keys lie in pages.
  CUTE_DEVICE bool in_pages() const { return kReadsCache && has_pages(arguments.params); }

  // Where this lane's box of a KV tile lies, where keys lie in pages. It is read before the wait
  // for a buffer, and so is there when the wait is over.
  CUTE_DEVICE PageRow look_up(ForwardTile const& tile, int32_t n_block) const {
    return in_pages() ? look_up_tile<kTileN>(arguments, tile, n_block * kTileN) : PageRow{};
  }

  // Starts the copies of a KV tile of K or V.
  template <int kCols, int kBox>
  CUTE_DEVICE void copy_keys(CUtensorMap const& map, ForwardTile const& tile,
                             TileOrigin const& origin, int32_t n_block, PageRow const& page,
                             Element* buffer, uint64_t& full) {
    if (in_pages()) {
      load_pages<kTileN, kCols, kBox>(arguments, map, tile, origin.head, n_block * kTileN, page,
                                      buffer, full, leader);
    } else if (leader) {
      Barrier::arrive_and_expect_tx(&full, kTileN * kCols * int(sizeof(Element)));
      load_boxes<kTileN, kCols, kBox>(map, origin, n_block * kTileN, buffer, full,
                                      cute::TMA::CacheHintSm90::EVICT_LAST);
    }
  }

  // K, and the bias of the scores that it gives.
  CUTE_DEVICE void load_k(ForwardTile const& tile, Origins const& from, int32_t n_block) {
    PageRow const page = look_up(tile, n_block);
    Barrier::wait(&shared.key_empty[ring_k.stage], ring_k.parity ^ 1);
    if constexpr (Traits::kBiasTiles) {
      if (leader && call_has<Traits::kKey.score_mods, score_mods::Bias>(arguments.params)) {
        TileOrigin origin = from.bias;
        origin.col = n_block * kTileN;
        load_bias_tile<Traits::kTileM, kTileN>(
            arguments.bias, origin, shared.bias_tile(ring_k.stage), shared.key_full[ring_k.stage]);
      }
    }
    copy_keys<Traits::kHeadDim, Traits::kBox>(
        arguments.map_k, tile, from.kv, n_block, page,
        shared.k.data() + ring_k.stage * (Traits::kBytesK / int(sizeof(Element))),
        shared.key_full[ring_k.stage]);
    ring_k.advance();
  }

  // The rows of a V tile that are zeros, whatever was loaded: all but [begin, end). They have
  // probability 0, but where sequences are packed or in a cache, the memory behind a sequence may
  // hold NaN, as may the buffer where no page was loaded, and 0 * NaN is NaN.
  CUTE_DEVICE KeyRange rows_with_values(ForwardTile const& tile, int32_t n_block) const {
    ForwardParams const& params = arguments.params;
    if (params.cu_seqlens_k == nullptr && !kReadsCache) {
      return {0, kTileN};
    }
    int32_t const begin = in_pages() ? boxes_of<kTileN>(arguments, tile, n_block * kTileN).begin *
                                           arguments.box_rows_k
                                     : 0;
    return {begin, min_of(tile.sequence.seqlen_k - n_block * kTileN, kTileN)};
  }

  // Loads a tile of V. Where rows of it must be zeros, this warp overwrites them, and only then
  // tells the consumers that the tile is there.
  CUTE_DEVICE void load_v(ForwardTile const& tile, TileOrigin const& origin, int32_t n_block) {
    Element* const buffer =
        shared.v.data() + ring_v.stage * (Traits::kBytesV / int(sizeof(Element)));
    uint64_t* const full = &shared.value_full[ring_v.stage];
    PageRow const page = look_up(tile, n_block);
    Barrier::wait(&shared.value_empty[ring_v.stage], ring_v.parity ^ 1);
    KeyRange const rows = rows_with_values(tile, n_block);
    bool const mend = rows.begin > 0 || rows.end < kTileN;
    uint64_t* const landed = mend ? &shared.value_landed : full;
    copy_keys<Traits::kHeadDimV, Traits::kBoxV>(arguments.map_v, tile, origin, n_block, page,
                                                buffer, *landed);
    if (mend) {
      Barrier::wait(landed, ring_landed.parity);
      ring_landed.advance();
      clear_rows<kTileN, Traits::kHeadDimV, Traits::kBoxV>(buffer, 0, rows.begin);
      clear_rows<kTileN, Traits::kHeadDimV, Traits::kBoxV>(buffer, rows.end);
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
