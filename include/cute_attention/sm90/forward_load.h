// sm90/forward_load.h: the load warps: TMA loads of Q, K and V, as far ahead as there are buffers.
#pragma once

#include "cute_attention/core/call_features.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/tile_load.h"

namespace cute_attention::sm90 {

// What a load warp loads.
enum class Loads { All, QueriesAndKeys, Values };

template <class Row, Loads kLoads = Loads::All>
struct ForwardLoad
    : TileLoad<Row, typename ForwardTraits<Row>::SharedMemory, ForwardLoad<Row, kLoads>> {
  using Traits = ForwardTraits<Row>;
  using Element = typename Traits::Element;
  using Base = TileLoad<Row, typename Traits::SharedMemory, ForwardLoad>;
  using Base::arguments, Base::kTileN, Base::leader, Base::shared;
  using typename Base::Origins;

  // Q is read once, and L2 may forget it first. But it fetches 256 bytes together, which at head
  // dim 64 are of two heads, and the other one's are read soon after. Forgotten, they were fetched
  // twice: sequences of 49 and 64 tokens took 1.12 times as long, of 128 tokens 1.03 (H200).
  static constexpr auto kQueryHint = Traits::kHeadDim <= 64 ? cute::TMA::CacheHintSm90::EVICT_NORMAL
                                                            : cute::TMA::CacheHintSm90::EVICT_FIRST;

  Ring<Traits::kStages> ring_k{};
  Ring<Traits::kStages> ring_v{};
  Ring<Traits::kStagesQ> ring_q{};

  // Whether the kernel that appends to the cache may still run.
  bool is_early = false;

  CUTE_DEVICE ForwardLoad(ForwardArguments const& arguments, typename Traits::SharedMemory& shared)
      : Base(arguments, shared) {
    if constexpr (Base::kReadsCache) {
      is_early = begins_early(arguments.params);
    }
  }

  // In the order in which the consumers need it: S of the next KV tile comes before O of this one.
  //
  //   K(n)  Q  K(n-1) V(n)  K(n-2) V(n-1)  ...  V(0) | K(n) Q ... of the next tile
  //
  // Where the kernel before still writes Q, Q comes last of what has buffers, and the first KV
  // tiles are on their way until then:
  //
  //   K(n)  K(n-1) V(n)  Q  K(n-2) V(n-1)  ...
  //
  // Of two load warps (kLoadWarps) each leaves out what the other one loads.
  CUTE_DEVICE void load_tile(ForwardTile const& tile) {
    Origins const from = this->origins(tile);
    int32_t const last = tile.kv.end - 1;
    int32_t const before_q = last_before_query(tile);
    // Pages are looked up a KV tile ahead: a read of the table takes as long as the copies of a
    // tile of small pages.
    PageRow page_v{}, page = this->look_up(tile, from.kv, last);
    // One place for each load: what is inlined twice takes twice the instruction cache.
    for (int32_t n_block = last; n_block >= tile.kv.begin - 1; --n_block) {
      if (kLoadsKeys && n_block >= tile.kv.begin) {
        load_k(tile, from, n_block, page);
      }
      if (n_block == tile.kv.begin) {
        want_next();
      }
      if (kLoadsValues && n_block != last) {
        load_v(tile, from.kv, n_block + 1, page_v);
      }
      if (kLoadsKeys && n_block == before_q) {
        await_query();
        load_q(this->origins(tile).q);  // computed anew: it would take registers until then
      }
      page_v = page;
      if (n_block > tile.kv.begin) {
        page = this->look_up(tile, from.kv, n_block - 1);
      }
    }
  }

  CUTE_DEVICE void want_next() {
    if constexpr (kLoadsKeys) {  // one of the load warps
      Base::want_next();
    }
  }

 private:
  static constexpr bool kLoadsKeys = kLoads != Loads::Values;
  static constexpr bool kLoadsValues = kLoads != Loads::QueriesAndKeys;

  // A forward that runs beside the kernel that appends (AppendedKeys) waits for its end here, and
  // nowhere else before it has loaded everything. What that kernel writes is
  //
  //   new keys and values  read by the load warps alone, in KV tiles that end after first_new():
  //                        last_before_query() waits before the first tile that is loaded, which
  //                        has the last keys, where that one has some
  //   turned queries       read by the load warp of Q alone: await_query()
  //   the lengths `used`   read by no warp: load_sequence_of() adds lengths up itself
  //
  // Lengths, offsets, slopes, sinks and keys of earlier calls were there before that kernel began,
  // since its own launch waits. O, LSE, splits and their counters are no memory of that kernel, and
  // the kernels that used them before ended before it began. Copies by TMA after the wait see what
  // that kernel has written, as they do after a launch that waits.
  CUTE_DEVICE void await_appended() {
    await_kernel_before();
    is_early = false;
  }

  // The KV tile after whose K, and V of the tile before, Q is loaded.
  CUTE_DEVICE int32_t last_before_query(ForwardTile const& tile) {
    int32_t const last = tile.kv.end - 1;
    if constexpr (Base::kReadsCache) {
      if (is_early && tile.kv.end * kTileN > first_new(tile)) {
        await_appended();
      }
      if (is_early && arguments.params.appended.turns_q != 0) {
        return max_of(last - (Traits::kStages - 1), tile.kv.begin - 1);
      }
    }
    return last;
  }

  // No key before this one is new. Where there is no room for all new keys, they begin later.
  CUTE_DEVICE int32_t first_new(ForwardTile const& tile) const {
    return tile.sequence.seqlen_k - appended_keys(arguments.params.appended, tile.work.batch);
  }

  CUTE_DEVICE void await_query() {
    if constexpr (Base::kReadsCache) {
      if (is_early && arguments.params.appended.turns_q != 0) {
        await_appended();
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
            shared.query_full[ring_q.stage][warpgroup], kQueryHint);
      }
    }
    ring_q.advance();
  }

  // K, and the bias of the scores that it gives.
  CUTE_DEVICE void load_k(ForwardTile const& tile, Origins const& from, int32_t n_block,
                          PageRow const& page) {
    // The numbers of a bias are there when the wait is over.
    KeyBiasNumbers<Traits::kKeyBias ? kTileN : 0> bias;
    if constexpr (Traits::kKeyBias) {
      bias.template load<Element>(arguments.params, tile.work.batch, tile.work.head,
                                  n_block * kTileN);
    }
    Barrier::wait(&shared.key_empty[ring_k.stage], ring_k.parity ^ 1);
    if constexpr (Traits::kKeyBias) {
      bias.store(shared.key_bias[ring_k.stage]);
      __syncwarp();  // all lanes have written, before the leader tells of it
    }
    if constexpr (Traits::kBiasTiles) {
      if (leader && call_has<Traits::kKey.score_mods, score_mods::Bias>(arguments.params)) {
        TileOrigin origin = from.bias;
        origin.col = n_block * Traits::kBiasCols;
        load_bias_tile<Traits::kTileM, Traits::kBiasCols>(
            arguments.bias, origin, shared.bias_tile(ring_k.stage), shared.key_full[ring_k.stage]);
      }
    }
    this->template copy_keys<Traits::kHeadDim, Traits::kBox>(
        arguments.map_k, from.kv, n_block, page,
        shared.k.data() + ring_k.stage * (Traits::kBytesK / int(sizeof(Element))),
        shared.key_full[ring_k.stage]);
    ring_k.advance();
  }

  // Loads a tile of V. Where rows of it must be zeros, this warp overwrites them, and only then
  // tells the consumers that the tile is there.
  CUTE_DEVICE void load_v(ForwardTile const& tile, TileOrigin const& origin, int32_t n_block,
                          PageRow const& page) {
    Element* const buffer =
        shared.v.data() + ring_v.stage * (Traits::kBytesV / int(sizeof(Element)));
    uint64_t* const full = &shared.value_full[ring_v.stage];
    Barrier::wait(&shared.value_empty[ring_v.stage], ring_v.parity ^ 1);
    KeyRange const rows = this->rows_with_values(tile, n_block);
    bool const mend = rows.begin > 0 || rows.end < kTileN;
    uint64_t* const landed = mend ? &shared.value_landed : full;
    this->template copy_keys<Traits::kHeadDimV, Traits::kBoxV>(arguments.map_v, origin, n_block,
                                                               page, buffer, *landed);
    if (mend) {
      Barrier::wait(landed, ring_landed.parity);
      ring_landed.advance();
      this->template mend<Traits::kHeadDimV, Traits::kBoxV>(buffer, rows, *full);
    }
    ring_v.advance();
  }

  Ring<1> ring_landed{};
};

}  // namespace cute_attention::sm90
