// sm90/grad_q_writer.h: the warp that writes dQ of heads whose sums are complete
// (sm90/complete_heads.h), scaled and rounded, as the kernel after the backward does with the rest.
//
// Nobody waits for this warp: when its CTA has no more blocks of keys, it leaves what is not
// written to the kernel after. It has 24 registers, and shares a scheduler with two warps of the
// consumers, so that each of its instructions takes a slot of theirs: some 450 for a part, by which
// the main kernel takes up to 1.05 times as long (docs/hopper_backward.md, "dQ of complete heads").
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_attention/core/address.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/warp.h"
#include "cute_attention/sm90/backward_states.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/bulk_copy.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradQueryWriter {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kParts = Traits::kConsumers;
  static constexpr int kNumbers = Traits::kPartNumbers;
  static constexpr int kBlocks = Traits::kColsQ / 8;  // of 8 columns, of a part
  // A thread's numbers of a row and of the one 8 rows after it, in two columns of a block
  // (core/global_sum.h): what it reads at once.
  static constexpr int kVectorBytes = 4 * int(sizeof(float));

  BackwardArguments const& arguments;
  typename Traits::SharedMemory& shared;

  // The parts of all blocks of the sums, one CTA after the other: in the order in which heads
  // become complete.
  CUTE_DEVICE void run() const {
    await_kernel_before();  // it sets what is left of each head
    uint32_t parity = 0;
    CUTE_NO_UNROLL
    for (int32_t part = cta_anew();; part += ctas_anew()) {
      if (!await_head(opaque(part))) {
        return;
      }
      if (Traits::kStoresFirst && arguments.sum_states != nullptr &&
          arguments.sum_states[part] == kSumNotBegun) {
        continue;  // of queries that see no key: the kernel after writes zeros
      }
      load(part);
      Barrier::wait(&shared.writer.full, parity);
      parity ^= 1;
      write(opaque(part));
      end_reads();
      if (lane_anew() == 0) {
        arguments.complete.written[part] = 1;
      }
    }
  }

 private:
  // Whether the part exists and its head is complete. Waits for that, while the CTA has blocks of
  // keys.
  CUTE_DEVICE bool await_head(int32_t part) const {
    BackwardParams const& params = arguments.params;
    int32_t const head = arguments.complete.by_parts.div(part);
    if (head >= params.batch * params.heads_kv) {
      return false;
    }
    // Each lane asks at its own time, so one of them decides for all.
    while (!decide(Barrier::test_wait(&shared.writer.ended, 0, 1))) {
      if (decide(load_acquire(arguments.complete.left + head) == 0)) {
        return true;
      }
      __nanosleep(2000);
    }
    return false;
  }

  CUTE_DEVICE static bool decide(bool of_lane) {
    return __shfl_sync(0xffffffffu, int(of_lane), 0) != 0;
  }

  // Starts loading the sums of a part.
  CUTE_DEVICE void load(int32_t part) const {
    if (lane_anew() == 0) {
      fence_bulk_adds();  // the sums have been seen to be complete: the copy comes after that
      constexpr int kBytes = kNumbers * int(sizeof(float));
      Barrier::arrive_and_expect_tx(&shared.writer.full, kBytes);
      cute::SM90_BULK_COPY_G2S::copy(arguments.params.grad_q_sum + int64_t{part} * kNumbers,
                                     &shared.writer.full, shared.writer.sums, kBytes);
    }
  }

  // Writes dQ of a part, whose sums are there.
  CUTE_DEVICE void write(int32_t part) const {
    BackwardParams const& params = arguments.params;
    int32_t const of_block = part % kParts;
    int32_t m_block, query_head, batch, head;
    arguments.complete.by_blocks(query_head, m_block, part / kParts);
    arguments.complete.by_heads(batch, head, query_head);
    int32_t const query = m_block * Traits::kTileM + Traits::row_part_q(of_block) * kWarpgroupM +
                          row_of_thread(lane_anew());
    int32_t const col = Traits::col_part_q(of_block) * Traits::kColsQ;
    int32_t const blocks = (params.head_dim - col) / 8;
    int32_t rows = params.seqlen_q - query;
    Element* row = row_pointer(static_cast<Element*>(params.grad_q), params.grad_q_stride, batch,
                               head, query) +
                   col + lane_anew() % kThreadsPerRow * 2;
    uint32_t source = cute::cast_smem_ptr_to_uint(shared.writer.sums) + lane_anew() * kVectorBytes;
    float const scale = grad_qk_scale(params);
    // What each warp of the consumers has computed: 16 rows.
    CUTE_NO_UNROLL
    for (int warp = 0; warp < kWarpgroupWarps; ++warp) {
      Element* const row_after = row + 8 * params.grad_q_stride.row;
      auto const write_block = [&](int block) {
        write_vector(source + block * (kWarpgroupThreads * kVectorBytes), row + 8 * block,
                     row_after + 8 * block, rows, scale);
      };
      if (blocks >= kBlocks) {
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          write_block(block);
        }
      } else {
        CUTE_NO_UNROLL
        for (int block = 0; block < blocks; ++block) {
          write_block(block);
        }
      }
      row += 16 * params.grad_q_stride.row;
      rows -= 16;
      source += 32 * kVectorBytes;
    }
  }

  //   source  where in shared memory the numbers are
  //   rows    how many rows there are from the first one on
  CUTE_DEVICE static void write_vector(uint32_t source, Element* row, Element* row_after,
                                       int32_t rows, float scale) {
    float4 sums;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(sums.x), "=f"(sums.y), "=f"(sums.z), "=f"(sums.w)
                 : "r"(source)
                 : "memory");
    if (rows > 0) {
      write_pair(row, sums.x * scale, sums.y * scale);
    }
    if (rows > 8) {
      write_pair(row_after, sums.z * scale, sums.w * scale);
    }
  }

  CUTE_DEVICE static void write_pair(Element* place, float first, float second) {
    using Converter = cutlass::NumericArrayConverter<Element, float, 2>;
    cutlass::Array<float, 2> pair;
    pair[0] = first;
    pair[1] = second;
    auto const rounded = Converter::convert(pair);
    *reinterpret_cast<uint32_t*>(place) = reinterpret_cast<uint32_t const&>(rounded);
  }
};

}  // namespace cute_attention::sm90
