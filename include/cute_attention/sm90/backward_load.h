// sm90/backward_load.h: the load warp: K and V once, then Q with the LSE and dO with delta of one
// step after the other, as far ahead as there are buffers.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm80.hpp>

#include "cute_attention/core/backward_steps.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/tma_tile.h"

namespace cute_attention::sm90 {

template <class Row>
struct BackwardLoad {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Step = BackwardStep<Element>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;

  BackwardArguments const& arguments;
  SharedMemory& shared;
  GradTile const& tile;
  Sequence const& sequence;
  bool const leader;  // one lane talks to the TMA unit and to the barriers
  Ring<Traits::kStages> ring{};
  Ring<1> ring_landed{};

  CUTE_DEVICE BackwardLoad(BackwardArguments const& arguments, SharedMemory& shared)
      : arguments(arguments),
        shared(shared),
        tile(shared.work.tile),
        sequence(shared.work.sequence),
        leader(cute::elect_one_sync()) {}

  CUTE_DEVICE void run() {
    BackwardSteps<Element, kTileM> const steps(arguments.params, tile, sequence, shared.work.tiles);
    Step step = steps.first();
    for (int count = steps.count(), t = 0; t < count; ++t) {
      int const m_begin = step.m_block * kTileM;
      if (t == 0) {
        load_keys(arguments.map_k, shared.k.data(), shared.key_full);
      }
      load_queries(step, m_begin);
      if (t == 0) {
        load_values();
      }
      load_grad_o(step, m_begin);
      ring.advance();
      steps.advance(step);
    }
  }

 private:
  CUTE_DEVICE TileOrigin origin_q(Step const& step) const {
    bool const packed = arguments.params.cu_seqlens_q != nullptr;
    return {packed ? 0 : tile.batch, step.head, 0, int32_t(sequence.row_q)};
  }
  CUTE_DEVICE TileOrigin origin_k() const {
    bool const packed = arguments.params.cu_seqlens_k != nullptr;
    return {packed ? 0 : tile.batch, tile.head_kv, 0, int32_t(sequence.row_k)};
  }

  CUTE_DEVICE void load_keys(CUtensorMap const& map, Element* buffer, uint64_t& full) {
    int32_t const n_begin = tile.n_block * kTileN;
    load<kTileN, Traits::kHeadDim>(map, origin_k(), n_begin, sequence.seqlen_k - n_begin,
                                   arguments.params.cu_seqlens_k != nullptr, buffer, full);
  }
  CUTE_DEVICE void load_values() {
    int32_t const n_begin = tile.n_block * kTileN;
    load<kTileN, Traits::kHeadDimV>(
        arguments.map_v, origin_k(), n_begin, sequence.seqlen_k - n_begin,
        arguments.params.cu_seqlens_k != nullptr, shared.v.data(), shared.value_full);
  }

  CUTE_DEVICE void load_queries(Step const& step, int m_begin) {
    Barrier::wait(&shared.query_empty[ring.stage], ring.parity ^ 1);
    uint64_t& full = shared.query_full[ring.stage];
    load_numbers(arguments.params.delta + lse_size(arguments.params) + step.row,
                 sequence.seqlen_q - m_begin, shared.lse[ring.stage], full);
    load<kTileM, Traits::kHeadDim>(
        arguments.map_q, origin_q(step), m_begin, sequence.seqlen_q - m_begin,
        arguments.params.cu_seqlens_q != nullptr,
        shared.q.data() + ring.stage * (Traits::kBytesQ / int(sizeof(Element))), full);
  }
  CUTE_DEVICE void load_grad_o(Step const& step, int m_begin) {
    Barrier::wait(&shared.grad_o_empty[ring.stage], ring.parity ^ 1);
    uint64_t& full = shared.grad_o_full[ring.stage];
    load_numbers(arguments.params.delta + step.row, sequence.seqlen_q - m_begin,
                 shared.delta[ring.stage], full);
    load<kTileM, Traits::kHeadDimV>(
        arguments.map_grad_o, origin_q(step), m_begin, sequence.seqlen_q - m_begin,
        arguments.params.cu_seqlens_q != nullptr,
        shared.grad_o.data() + ring.stage * (Traits::kBytesGradO / int(sizeof(Element))), full);
  }

  // Loads a tile of which the first `rows` rows belong to the sequence. What TMA finds past the end
  // of a tensor are zeros. Past the end of a packed sequence it finds another's rows, which may be
  // NaN, and 0 * NaN is NaN: this warp overwrites them, and only then tells that the tile is there.
  template <int kRows, int kCols>
  CUTE_DEVICE void load(CUtensorMap const& map, TileOrigin const& origin, int32_t row, int32_t rows,
                        bool packed, Element* buffer, uint64_t& full) {
    bool const mend = packed && rows < kRows;
    uint64_t& landed = mend ? shared.landed : full;
    if (leader) {
      Barrier::arrive_and_expect_tx(&landed, kRows * kCols * int(sizeof(Element)));
      load_boxes<kRows, kCols>(map, origin, row, buffer, landed,
                               cute::TMA::CacheHintSm90::EVICT_LAST);
    }
    if (mend) {
      Barrier::wait(&shared.landed, ring_landed.parity);
      ring_landed.advance();
      clear_rows<kRows, kCols>(buffer, rows);
      cutlass::arch::fence_view_async_shared();  // before WGMMAs read what these lanes wrote
      __syncwarp();
      if (leader) {
        Barrier::arrive(&full);
      }
    }
  }

  // Loads one number for each query of a tile; zeros for those past the sequence's end.
  CUTE_DEVICE void load_numbers(float const* source, int32_t rows, float* target, uint64_t& full) {
    int const lane = int(threadIdx.x) % 32;
    CUTE_UNROLL
    for (int i = lane; i < kTileM; i += 32) {
      bool const inside = i < rows;
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(source[inside ? i : 0], target[i], inside);
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(&full);
  }
};

}  // namespace cute_attention::sm90
