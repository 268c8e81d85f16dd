// sm90/mla_load.h: the producer warp of the kernel for rows with qv: TMA loads of the parts of
// queries and keys, as far ahead as there are buffers.
#pragma once

#include "cute_attention/sm90/mla_traits.h"
#include "cute_attention/sm90/tile_load.h"

namespace cute_attention::sm90 {

template <class Row>
struct MlaLoad : TileLoad<Row, typename MlaTraits<Row>::SharedMemory, MlaLoad<Row>> {
  using Traits = MlaTraits<Row>;
  using Element = typename Traits::Element;
  using Base = TileLoad<Row, typename Traits::SharedMemory, MlaLoad>;
  using Base::arguments, Base::kTileN, Base::leader, Base::shared;
  using typename Base::Origins;

  Ring<Traits::kStages> ring{};
  Ring<1> ring_q{};
  Ring<1> ring_landed{};

  using Base::Base;

  //   KV(n)  Q  KV(n-1)  KV(n-2) ...  KV(0) | KV(n) Q ... of the next tile
  CUTE_DEVICE void load_tile(ForwardTile const& tile) {
    Origins const from = this->origins(tile);
    int32_t const last = tile.kv.end - 1;
#pragma unroll 1
    for (int32_t n_block = last; n_block >= tile.kv.begin; --n_block) {
      load_keys(tile, from.kv, n_block);
      if (n_block == last) {
        load_q(from.q);
      }
    }
  }

 private:
  CUTE_DEVICE void load_q(TileOrigin const& origin) {
    Barrier::wait(&shared.query_empty, ring_q.parity ^ 1);
    if (leader) {
      constexpr auto kHint = cute::TMA::CacheHintSm90::EVICT_FIRST;
      Barrier::arrive_and_expect_tx(&shared.query_full, sizeof(shared.q));
      load_boxes<kWarpgroupM, Traits::kHeadDimV, Traits::kBoxV>(
          arguments.map_qv, origin, 0, shared.q.data(), shared.query_full, kHint);
      load_boxes<kWarpgroupM, Traits::kHeadDim, Traits::kBox>(
          arguments.map_q, origin, 0, shared.q.data() + Traits::offset_q(kRope), shared.query_full,
          kHint);
    }
    ring_q.advance();
  }

  // A tile of k and v, in the order in which its parts are released: k first, which S alone reads.
  CUTE_DEVICE void load_keys(ForwardTile const& tile, TileOrigin const& origin, int32_t n_block) {
    auto& full = shared.part_full[ring.stage];
    auto& empty = shared.part_empty[ring.stage];
    uint32_t const free = ring.parity ^ 1;
    PageRow const page = this->look_up(tile, origin, n_block);
    Barrier::wait(&empty[kRope], free);
    this->template copy_keys<Traits::kHeadDim, Traits::kBox>(arguments.map_k, origin, n_block, page,
                                                             part(kRope), full[kRope]);
    KeyRange const rows = this->rows_with_values(tile, n_block);
    bool const mend = rows.begin > 0 || rows.end < kTileN;
    TileOrigin columns = origin;
#pragma unroll 1
    for (int half = kLeft; half <= kRight; ++half) {
      Barrier::wait(&empty[half], free);
      this->template copy_keys<Traits::kHalf, Traits::kBoxV>(
          arguments.map_v, columns, n_block, page, part(half),
          mend ? shared.landed[half] : full[half]);
      columns.col += Traits::kHalf;
    }
    if (mend) {
      mend_values(rows, full);
    }
    ring.advance();
  }

  // Overwrites the rows of V that must be zeros, and tells the consumers that V is there. S of
  // these keys is hidden.
  CUTE_DEVICE void mend_values(KeyRange const& rows, uint64_t (&full)[kParts]) {
#pragma unroll 1
    for (int half = kLeft; half <= kRight; ++half) {
      Barrier::wait(&shared.landed[half], ring_landed.parity);
      this->template mend<Traits::kHalf, Traits::kBoxV>(part(half), rows, full[half]);
    }
    ring_landed.advance();
  }

  CUTE_DEVICE Element* part(int part) const {
    return shared.kv.data() + Traits::offset_kv(int(ring.stage), part);
  }
};

}  // namespace cute_attention::sm90
