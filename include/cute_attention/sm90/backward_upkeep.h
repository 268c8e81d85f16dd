// sm90/backward_upkeep.h: the warp of a CTA that keeps sums of dQ (core/sum_upkeep.h).
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/address.h"
#include "cute_attention/core/cta_turn.h"
#include "cute_attention/core/global_sum.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/sm90/backward_sum.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

template <class Row>
struct BackwardUpkeep {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kNumbers = kTileM * Traits::kHeadDim;  // of a tile of sums
  static constexpr int kUnits = kNumbers / (32 * 16);  // of a tile: what a warp has at a time
  static constexpr int kCols8 = Traits::kColsQ / 8;    // of a part: neighbouring 8 columns
  static_assert(kCols8 % 2 == 0, "two lanes share a row");

  BackwardArguments const& arguments;
  typename Traits::SharedMemory& shared;

  CUTE_DEVICE void run() const {
    SumUpkeep const& upkeep = arguments.upkeep;
    for (int32_t number = 0;; ++number) {
      auto const slot = buffer_of<kWorkSlots>(number);
      Barrier::wait(&shared.work_full[slot.stage], slot.parity);
      GradTile const tile = shared.works[slot.stage].tile;
      __syncwarp();  // all lanes have read the work
      arrive_by_warp(shared.work_empty[slot.stage]);
      if (tile.n_block < 0) {
        break;
      }
      if (!upkeep.is_used()) {
        continue;
      }
      int32_t const head = tile.batch * arguments.params.heads_kv + tile.head_kv;
      if (head + upkeep.per_group < upkeep.all_heads) {
        clear(head + upkeep.per_group, tile.n_block);
      }
      if (head >= upkeep.per_group) {
        write_grad_queries(head - upkeep.per_group, tile.n_block);
      }
    }
  }

 private:
  // The tiles of queries of a head.
  CUTE_DEVICE int32_t m_blocks() const { return ceil_div(arguments.params.seqlen_q, kTileM); }
  CUTE_DEVICE int32_t group() const { return arguments.params.heads / arguments.params.heads_kv; }

  CUTE_DEVICE SumSlice slice(int32_t n_block) const {
    return sum_slice(int64_t(group()) * m_blocks(), n_block, arguments.schedule.n_blocks);
  }
  // The first sum of a KV head of all sequences: its query heads follow each other.
  CUTE_DEVICE float* sums_of(int32_t head) const {
    return arguments.params.grad_q_sum + int64_t(head) * group() * m_blocks() * kNumbers;
  }

  // Sets a slice of the sums of a head to zero.
  CUTE_DEVICE void clear(int32_t head, int32_t n_block) const {
    SumSlice const own = slice(n_block);
    auto* const sums = reinterpret_cast<float4*>(sums_of(head) + int64_t(own.begin) * kNumbers);
    int32_t const vectors = (own.end - own.begin) * (kNumbers / 4);
    for (int32_t i = lane_of_warp(); i < vectors; i += 32) {
      sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    fence_bulk_copies();
    __syncwarp();
    if (lane_of_warp() == 0) {
      end_turn(arguments.upkeep.slices_of_zeros(head));
    }
  }

  // Writes dQ of a slice of the queries of a head, once all has been added.
  CUTE_DEVICE void write_grad_queries(int32_t head, int32_t n_block) const {
    await_turns(arguments.upkeep.added_parts(head),
                arguments.schedule.n_blocks * Traits::kConsumers);
    fence_bulk_copies();
    SumSlice const own = slice(n_block);
    CUTE_NO_UNROLL
    for (int32_t unit = own.begin * kUnits; unit < own.end * kUnits; ++unit) {
      write_unit(head, unit / kUnits, unit % kUnits);
    }
  }

  // Writes one unit of a tile of dQ: the warp has 32 rows of 16 columns. In memory 64 rows of 8
  // columns follow each other, of which the four threads of a consumer that share two rows have 64
  // bytes. A lane takes these, and writes 8 columns of both rows; its neighbour has the next 8, so
  // that both fill whole sectors.
  CUTE_DEVICE void write_unit(int32_t head, int32_t tile, int32_t unit) const {
    BackwardParams const& params = arguments.params;
    int32_t const cols8 = unit / 2 * 2 + lane_of_warp() % 2;
    int32_t const thread = (unit % 2 * 16 + lane_of_warp() / 2) * kThreadsPerRow;  // the first
    auto const* const source =
        reinterpret_cast<float4 const*>(sums_of(head) + int64_t(tile) * kNumbers) +
        vector_in_block<kWarpgroupThreads>(cols8, thread);
    float4 sums[kThreadsPerRow];
    CUTE_UNROLL
    for (int i = 0; i < kThreadsPerRow; ++i) {
      sums[i] = source[i];
    }
    float const scale = grad_qk_scale(params);
    uint32_t upper[kThreadsPerRow], lower[kThreadsPerRow];  // of the two rows
    CUTE_UNROLL
    for (int i = 0; i < kThreadsPerRow; ++i) {
      upper[i] = pack<Element>(sums[i].x * scale, sums[i].y * scale);
      lower[i] = pack<Element>(sums[i].z * scale, sums[i].w * scale);
    }
    int32_t const part = unit / kCols8;  // cols8 / kCols8, but the same for all lanes
    int32_t const query = uint32_t(tile) % uint32_t(m_blocks()) * kTileM +
                          Traits::row_part_q(part) * kWarpgroupM + row_of_thread(thread);
    int32_t const col = Traits::col_part_q(part) * Traits::kColsQ + cols8 % kCols8 * 8;
    // Divisions of unsigned numbers take fewer registers.
    uint32_t const query_head = uint32_t(head * group()) + uint32_t(tile) / uint32_t(m_blocks());
    if (col < params.head_dim) {
      Element* const row = row_pointer(static_cast<Element*>(params.grad_q), params.grad_q_stride,
                                       query_head / uint32_t(params.heads),
                                       query_head % uint32_t(params.heads), query) +
                           col;
      store_columns(row, query, upper);
      store_columns(row + 8 * params.grad_q_stride.row, query + 8, lower);
    }
  }

  CUTE_DEVICE void store_columns(Element* row, int32_t query,
                                 uint32_t const (&columns)[kThreadsPerRow]) const {
    if (query < arguments.params.seqlen_q) {
      *reinterpret_cast<uint4*>(row) = uint4{columns[0], columns[1], columns[2], columns[3]};
    }
  }
};

}  // namespace cute_attention::sm90
