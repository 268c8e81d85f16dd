// sm90/grad_q_load.h: the load warp of the kernel for dQ: it takes one tile of queries after the
// other, and loads its Q and dO, and K and V of its steps, as far ahead as there are buffers.
#pragma once

#include "cute_attention/sm90/grad_q_traits.h"
#include "cute_attention/sm90/work_load.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradQLoad : WorkLoad<GradQWork, typename GradQTraits<Row>::SharedMemory, GradQLoad<Row>> {
  using Traits = GradQTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Base = WorkLoad<GradQWork, SharedMemory, GradQLoad>;
  using Base::arguments, Base::blocks, Base::leader, Base::mended, Base::shared, Base::work;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  Ring<1> ring_q{};
  Ring<Traits::kStagesK> ring_k{};
  Ring<Traits::kStagesV> ring_v{};

  CUTE_DEVICE GradQLoad(BackwardArguments const& arguments, SharedMemory& shared)
      : Base(arguments, shared, {arguments.params.cu_seqlens_q, arguments.params.batch, kTileM}) {}

  // The first tile of a CTA is the one of its own number.
  CUTE_DEVICE int32_t first_index() const { return int32_t(blockIdx.x); }
  CUTE_DEVICE int32_t next_index() const {
    return kOneTile<Row> ? INT32_MAX : int32_t(gridDim.x) + Base::take(arguments.next_tile + 1);
  }

  // Tile number `index`, or the end. The tiles of packed sequences are counted on the device, one
  // sequence after the other: those that shorter sequences do not have are not counted.
  CUTE_DEVICE GradQWork work_from(int32_t index) {
    BackwardParams const& params = arguments.params;
    GradQWork work;
    bool more = index < work_tiles(params, kTileM);
    if (params.cu_seqlens_q == nullptr) {
      work.tile = work_tile(params, kTileM, more ? index : 0);
    } else {
      PackedBlock const block = blocks.find(index / params.heads);
      more = block.batch < params.batch;
      // The search counts the tiles of a sequence from its last, which under a causal mask has the
      // most keys, so that the longest work is taken first.
      work.tile = {block.after, index % params.heads, block.batch};
    }
    if (more) {
      work.sequence = load_sequence(params, work.tile.batch);
      work.kv = kv_tiles(work.sequence, work.tile.m_block * kTileM, kTileM, kTileN);
    } else {
      work.tile.m_block = -1;
    }
    return work;
  }

  // In the order in which the consumers need it.
  CUTE_DEVICE void load_work() {
    if (work->kv.begin >= work->kv.end) {
      return;
    }
    load_keys(work->kv.end - 1);
    load_queries<Traits::kHeadDim, Traits::kBox>(arguments.map_q, shared.q.data(),
                                                 shared.query_empty, shared.query_full);
    load_queries<Traits::kHeadDimV, Traits::kBoxV>(arguments.map_grad_o, shared.grad_o.data(),
                                                   shared.grad_o_empty, shared.grad_o_full);
    ring_q.advance();
    load_values(work->kv.end - 1);
    for (int32_t n_block = work->kv.end - 2; n_block >= work->kv.begin; --n_block) {
      load_keys(n_block);
      load_values(n_block);
    }
  }

 private:
  // Loads Q or dO. Rows past the end of the sequence give rows of dQ that nobody stores.
  template <int kCols, int kBox>
  CUTE_DEVICE void load_queries(CUtensorMap const& map, Element* buffer, uint64_t& empty,
                                uint64_t& full) {
    Barrier::wait(&empty, ring_q.parity ^ 1);
    if (leader) {
      bool const packed = arguments.params.cu_seqlens_q != nullptr;
      TileOrigin const origin{packed ? 0 : work->tile.batch, work->tile.head, 0,
                              int32_t(work->sequence.row_q) + work->tile.m_block * kTileM};
      Barrier::arrive_and_expect_tx(&full, kTileM * kCols * int(sizeof(Element)));
      CUTE_UNROLL
      for (int row = 0; row < kTileM; row += kWarpgroupM) {
        load_boxes<kWarpgroupM, kCols, kBox>(map, origin, row, buffer + row * kCols, full,
                                             cute::TMA::CacheHintSm90::EVICT_FIRST);
      }
    }
  }

  CUTE_DEVICE void load_keys(int32_t n_block) {
    Barrier::wait(&shared.key_empty[ring_k.stage], ring_k.parity ^ 1);
    load_rows_of_keys<Traits::kHeadDim, Traits::kBox>(
        n_block, arguments.map_k,
        shared.k.data() + ring_k.stage * (Traits::kBytesK / int(sizeof(Element))),
        shared.key_full[ring_k.stage]);
    ring_k.advance();
  }
  CUTE_DEVICE void load_values(int32_t n_block) {
    Barrier::wait(&shared.value_empty[ring_v.stage], ring_v.parity ^ 1);
    load_rows_of_keys<Traits::kHeadDimV, Traits::kBoxV>(
        n_block, arguments.map_v,
        shared.v.data() + ring_v.stage * (Traits::kBytesV / int(sizeof(Element))),
        shared.value_full[ring_v.stage]);
    ring_v.advance();
  }
  template <int kCols, int kBox>
  CUTE_DEVICE void load_rows_of_keys(int32_t n_block, CUtensorMap const& map, Element* buffer,
                                     uint64_t& full) {
    bool const packed = arguments.params.cu_seqlens_k != nullptr;
    int32_t const head_kv = work->tile.head / (arguments.params.heads / arguments.params.heads_kv);
    mended.template load<kTileN, kCols, kBox>(
        map, {packed ? 0 : work->tile.batch, head_kv, 0, int32_t(work->sequence.row_k)},
        n_block * kTileN, work->sequence.seqlen_k - n_block * kTileN, packed, buffer, full);
  }
};

}  // namespace cute_attention::sm90
