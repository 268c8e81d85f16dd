// sm90/grad_bias_load.h: the load warp of the kernel for the gradient of a bias: it goes through
// the tiles of scores (core/grad_bias_walk.h), tells the consumers of each, and loads what they
// need of it and do not have from the tile before.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "cute_attention/core/grad_bias_walk.h"
#include "cute_attention/sm90/grad_bias_traits.h"

namespace cute_attention::sm90 {

template <class Row, bool kSums>
struct GradBiasLoad {
  using Traits = GradBiasTraits<Row, kSums>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  using Walk = GradBiasWalk<kTileM, kTileN, kSums>;

  // What a visit has that the one before it had not.
  struct News {
    bool queries;
    bool keys;
    bool bias;
  };

  GradBiasArguments const& arguments;
  SharedMemory& shared;
  bool const leader;  // one lane talks to the TMA unit and to the barriers
  Walk const steps;
  Ring<kVisitSlots> slot{};
  Ring<Traits::kBuffersM> ring_m{};
  Ring<Traits::kBuffersN> ring_n{};
  Ring<1> ring_bias{};

  CUTE_DEVICE GradBiasLoad(GradBiasArguments const& arguments, SharedMemory& shared)
      : arguments(arguments),
        shared(shared),
        leader(cute::elect_one_sync()),
        steps{arguments.params, arguments.schedule} {}

  CUTE_DEVICE void run() {
    Ring<1> ring_sum{};
    for (int32_t index = int32_t(blockIdx.x); index < arguments.works; index = next_index()) {
      visit_work(index);
      if (kSums && sums_in_shared(arguments.params)) {
        Barrier::wait(&shared.sum_written, ring_sum.parity);
        ring_sum.advance();
      }
    }
    GradBiasVisit end{};
    end.is_end = true;
    announce(end);
  }

 private:
  // Whether the consumers add up columns or rows of a sum where the chunks lie.
  CUTE_DEVICE static bool sums_in_shared(BackwardParams const& params) {
    return params.grad_bias.row_stride == 0 || params.grad_bias.col_stride == 0;
  }

  // The first work of a CTA is the one of its own number.
  CUTE_DEVICE int32_t next_index() const {
    int32_t taken = 0;
    if (lane_of_warp() == 0) {
      taken = atomicAdd(arguments.next_work, 1);
    }
    return int32_t(gridDim.x) + warp_uniform(taken);
  }

  CUTE_DEVICE void visit_work(int32_t index) {
    GradBiasWork const work = steps.work(index);
    typename Walk::Visit visit{work.first, work.count};
    if (visit.left <= 0 || !(is_visible(visit.block, index) || advance(visit, index))) {
      if (kSums) {
        announce(hidden(work.first, index));
      }
      return;
    }
    News news{true, true, true};
    bool more = true;
    while (more) {
      ScoreBlock const now = visit.block;
      more = advance(visit, index);
      News const next = more ? between(now, visit.block) : News{true, true, true};
      Sequence const sequence = load_sequence(arguments.params, now.batch);
      announce({now, sequence, index, false, true,
                kv_tiles(sequence, now.m_block * kTileM, kTileM, kTileN).masked(now.n_block), !more,
                news.queries, next.queries, next.keys, next.bias});
      load(now, sequence, news);
      news = next;
    }
  }

  // Whether the tile is visible. If not, and if it is a tile of the gradient, the consumers are
  // told to write zeros there.
  CUTE_DEVICE bool is_visible(ScoreBlock const& block, int32_t index) {
    bool const visible = steps.is_visible(block);
    if (!kSums && !visible) {
      announce(hidden(block, index));
    }
    return visible;
  }

  // Moves to the next visible tile. Returns false after the last.
  CUTE_DEVICE bool advance(typename Walk::Visit& visit, int32_t index) {
    while (steps.move(visit)) {
      if (is_visible(visit.block, index)) {
        return true;
      }
    }
    return false;
  }

  // A visit of scores that are all hidden.
  CUTE_DEVICE GradBiasVisit hidden(ScoreBlock const& block, int32_t index) const {
    GradBiasVisit visit{};
    visit.block = block;
    visit.work = index;
    visit.ends_work = true;
    return visit;
  }

  CUTE_DEVICE News between(ScoreBlock const& from, ScoreBlock const& to) const {
    auto const changes = steps.changes(from, to);
    BiasTiles const& bias = arguments.bias;
    return {!Traits::kKeepsM || changes.queries, !Traits::kKeepsN || changes.keys,
            (bias.has_batch && from.batch != to.batch) || (bias.has_head && from.head != to.head) ||
                (bias.has_row && from.m_block != to.m_block) || from.n_block != to.n_block};
  }

  CUTE_DEVICE void announce(GradBiasVisit const& visit) {
    Barrier::wait(&shared.visit_empty[slot.stage], slot.parity ^ 1);
    if (leader) {
      shared.visits[slot.stage] = visit;
      Barrier::arrive(&shared.visit_full[slot.stage]);
    }
    slot.advance();
  }

  // In the order in which the consumers need it. Rows past the end of a sequence are other ones',
  // or zeros: the consumers clear what comes of them.
  CUTE_DEVICE void load(ScoreBlock const& block, Sequence const& sequence, News const& news) {
    BackwardParams const& params = arguments.params;
    int32_t const batch = params.cu_seqlens_q == nullptr ? block.batch : 0;
    TileOrigin const queries{batch, block.head, 0,
                             int32_t(sequence.row_q) + block.m_block * kTileM};
    TileOrigin const keys{batch, steps.head_kv(block), 0,
                          int32_t(sequence.row_k) + block.n_block * kTileN};
    load_chunks<Traits::kChunksS>(arguments.map_q, queries, news.queries, arguments.map_k, keys,
                                  news.keys);
    if (news.bias && arguments.bias_is_aligned) {
      Barrier::wait(&shared.bias_empty, ring_bias.parity ^ 1);
      ring_bias.advance();
      if (leader) {
        load_bias_tile<kTileM, kTileN>(
            arguments.bias,
            {block.batch, block.head, 0, block.m_block * kTileM, block.n_block * kTileN},
            shared.bias_tile(0), shared.bias_full);
        Barrier::arrive(&shared.bias_full);
      }
    }
    load_chunks<Traits::kChunksP>(arguments.map_grad_o, queries, news.queries, arguments.map_v,
                                  keys, news.keys);
  }

  // The chunks of a product.
  template <int kCount>
  CUTE_DEVICE void load_chunks(CUtensorMap const& map_m, TileOrigin queries, bool new_queries,
                               CUtensorMap const& map_n, TileOrigin keys, bool new_keys) {
#pragma unroll 1
    for (int chunk = 0; chunk < kCount; ++chunk) {
      queries.col = keys.col = chunk * Traits::kChunk;
      if (new_queries) {
        load_chunk<kTileM>(map_m, queries, shared.chunks.m.data(), ring_m, shared.m_full,
                           shared.m_empty, cute::TMA::CacheHintSm90::EVICT_NORMAL);
      }
      if (new_keys) {
        load_chunk<kTileN>(map_n, keys, shared.chunks.n.data(), ring_n, shared.n_full,
                           shared.n_empty, cute::TMA::CacheHintSm90::EVICT_LAST);
      }
    }
  }
  template <int kRows, int kBuffers>
  CUTE_DEVICE void load_chunk(CUtensorMap const& map, TileOrigin const& origin, Element* buffers,
                              Ring<kBuffers>& ring, uint64_t (&full)[kBuffers],
                              uint64_t (&empty)[kBuffers], cute::TMA::CacheHintSm90 hint) {
    constexpr int kCols = Traits::kChunk;
    Barrier::wait(&empty[ring.stage], ring.parity ^ 1);
    if (leader) {
      Barrier::arrive_and_expect_tx(&full[ring.stage], kRows * kCols * int(sizeof(Element)));
      load_boxes<kRows, kCols>(map, origin, 0, buffers + ring.stage * (kRows * kCols),
                               full[ring.stage], hint);
    }
    ring.advance();
  }
};

}  // namespace cute_attention::sm90
