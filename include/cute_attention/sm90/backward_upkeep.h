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

  template <int kCount>
  using Numbers = cutlass::AlignedArray<float, kCount>;

  BackwardArguments const& arguments;
  typename Traits::SharedMemory& shared;

  CUTE_DEVICE void run() const {
    SumUpkeep const& upkeep = arguments.upkeep;
    for (Ring<kWorkSlots> slot{};; slot.advance()) {
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
    for (int32_t tile = own.begin; tile < own.end; ++tile) {
      CUTE_NO_UNROLL
      for (int32_t warp = 0; warp < Traits::kConsumers * kWarpgroupWarps; ++warp) {
        write_rows(head, tile, warp);
      }
    }
  }

  // Writes what one warp of the consumers has of a tile of dQ: 32 columns at a time.
  CUTE_DEVICE void write_rows(int32_t head, int32_t tile, int32_t warp) const {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    constexpr int kBlocks = Traits::kColsQ / 8;
    int32_t const part = warp / kWarpgroupWarps;
    int32_t const thread = warp % kWarpgroupWarps * 32 + lane_of_warp();
    int32_t const query_head = head * group() + tile / m_blocks();  // of all sequences
    int32_t const query =
        tile % m_blocks() * kTileM + Traits::row_part_q(part) * kWarpgroupM + row_of_thread(thread);
    auto const* const source = reinterpret_cast<float4 const*>(
        sums_of(head) + int64_t(tile) * kNumbers + part * (kNumbers / Traits::kConsumers));
    int32_t const col = Traits::col_part_q(part) * Traits::kColsQ;
    int32_t const cols = min_of(params.head_dim - col, Traits::kColsQ);  // that exist
    Element* const first =
        row_pointer(static_cast<Element*>(params.grad_q), params.grad_q_stride,
                    query_head / params.heads, query_head % params.heads, query) +
        col;
    constexpr int kMost = 4;  // more at a time would spill
    constexpr int kRows = Traits::kGradQFirst ? 1 : 2;
    CUTE_NO_UNROLL
    for (int block = 0; block < kBlocks; block += kMost) {
      CUTE_NO_UNROLL
      for (int row = 0; row < 2; row += kRows) {
        Tensor values = make_tensor<float>(Shape<Int<2 * kMost>, Int<kRows>>{});  // (COLS, ROWS)
        CUTE_UNROLL
        for (int i = 0; i < kMost; ++i) {
          int const vector = min_of(block + i, kBlocks - 1);  // the last chunk may have fewer
          auto const* const numbers =
              reinterpret_cast<Numbers<2 * kRows> const*>(
                  source + vector_in_block<kWarpgroupThreads>(vector, thread)) +
              row;
          Numbers<2 * kRows> const own = *numbers;
          CUTE_UNROLL
          for (int n = 0; n < 2 * kRows; ++n) {
            values(2 * i + n % 2, n / 2) = own[n] * grad_qk_scale(params);
          }
        }
        CUTE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          store_row(values(_, r), first + 8 * (row + r) * params.grad_q_stride.row + 8 * block,
                    query + 8 * (row + r) < params.seqlen_q, cols - 8 * block, thread);
        }
      }
    }
  }
};

}  // namespace cute_attention::sm90
