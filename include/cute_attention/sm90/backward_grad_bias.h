// sm90/backward_grad_bias.h: the gradient of a bias that has a number for each score. It is dS,
// which the consumers write to shared memory for dQ: a warp stores its tiles from there. Nothing is
// computed again, and the consumers do nothing for it.
//
// A step's dS is stored while dQ of it is computed, and its buffer is free when both have been
// read. What no step computes, since no query sees a key, a kernel before sets to zero.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_attention/core/backward_passes.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/bias.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/bulk_copy.h"

namespace cute_attention::sm90 {

// Whether the gradient of a call's bias is dS of each score, of 16 bits, and TMA can write it.
template <class Traits>
bool stores_grad_bias(BackwardParams const& params) {
  BiasTensor const& grad = params.grad_bias;
  auto const is_summed = [](int64_t stride, int32_t extent) { return stride == 0 && extent > 1; };
  return Traits::kStoresGradS && grad.data != nullptr && !grad.is_float &&
         params.cu_seqlens_q == nullptr && params.cu_seqlens_k == nullptr &&
         !is_summed(grad.batch_stride, params.batch) &&
         !is_summed(grad.head_stride, params.heads) &&
         !is_summed(grad.row_stride, params.seqlen_q) && tma_describes(grad, params);
}

// Makes the map of the gradient, whose boxes are the part of dS that a warpgroup writes.
template <class Traits>
cudaError_t make_grad_bias_map(CUtensorMap* map, BackwardParams const& params) {
  BiasTensor const& grad = params.grad_bias;
  TensorView const view{grad.data,       params.batch,
                        params.seqlen_q, params.heads,
                        params.seqlen_k, {grad.batch_stride, grad.row_stride, grad.head_stride}};
  return make_tensor_map<typename Traits::Element>(map, view, 1, {kWarpgroupM, 1, Traits::kTileM});
}

// Stores dS of each step. One lane of a warp does it all.
template <class Row>
CUTE_DEVICE void store_grad_scores(BackwardArguments const& arguments,
                                   typename BackwardTraits<Row>::SharedMemory& shared) {
  using Traits = BackwardTraits<Row>;
  constexpr int kPart = Traits::kTileM * kWarpgroupM;  // numbers of a warpgroup
  if (!arguments.stores_grad_bias || !cute::elect_one_sync()) {
    return;
  }
  Ring<Traits::kStagesS> ring{};
  for (Ring<kWorkSlots> slot{};; slot.advance()) {
    Barrier::wait(&shared.work_full[slot.stage], slot.parity);
    BackwardWork const& work = shared.works[slot.stage];
    if (work.is_end()) {
      break;
    }
    BackwardSteps<typename Traits::Element, Traits::kTileM, Traits::kAnyOrder> const steps(
        arguments.params, work.tile, work.sequence, work.tiles, work.steps);
    int remaining = steps.count();
    // Where dQ is late, the first dS is of a step that does not exist (backward_compute.h).
    if (Traits::kGradQLag > 0 && remaining > 0) {
      Barrier::wait(&shared.grad_s_full[ring.stage], ring.parity);
      Barrier::arrive(&shared.grad_s_empty[ring.stage]);
      ring.advance();
    }
    int32_t head = work.steps.head;
    int32_t m_block = work.steps.m_block;
    for (; remaining > 0; --remaining) {
      Barrier::wait(&shared.grad_s_full[ring.stage], ring.parity);
      auto* const parts = shared.grad_s.data() + ring.stage * (Traits::kConsumers * kPart);
      CUTE_UNROLL
      for (int part = 0; part < Traits::kConsumers; ++part) {
        cute::SM90_TMA_STORE_5D::copy(&arguments.map_grad_bias, parts + part * kPart,
                                      work.tile.n_block * Traits::kTileN + part * kWarpgroupM, 0,
                                      m_block * Traits::kTileM, head, work.tile.batch);
      }
      end_bulk_group();
      await_bulk_reads();
      Barrier::arrive(&shared.grad_s_empty[ring.stage]);
      ring.advance();
      steps.advance(head, m_block);
    }
    Barrier::arrive(&shared.work_empty[slot.stage]);
  }
  await_bulk_writes();
}

// What a CTA of the kernel before does: it sets to zero what no step computes of the gradient of a
// tile of queries. Keys are cleared in vectors of 8, the last of a row one by one.
template <class Row>
struct ClearGradBias {
  using Traits = BackwardTraits<Row>;
  using Element = typename Traits::Element;
  static constexpr int kThreads = 256;
  static constexpr int kVector = 8;

  // Whether a call has such tiles. A mask hides a band on either side of the diagonal: if any, the
  // first keys or the last ones have some.
  static bool has_hidden(BackwardParams const& params) {
    int32_t const m_blocks = ceil_div(params.seqlen_q, Traits::kTileM);
    int32_t const n_blocks = ceil_div(params.seqlen_k, Traits::kTileN);
    return steps_of(params, 0).count() < m_blocks ||
           steps_of(params, n_blocks - 1).count() < m_blocks;
  }

  CUTE_DEVICE static void run(BackwardParams const& params) {
    constexpr int kVectorsOfRow = Traits::kTileN / kVector, kRowsAtOnce = kThreads / kVectorsOfRow;
    WorkTile const work = last_first(params, Traits::kTileM);
    BiasTensor const& grad = params.grad_bias;
    int const col = int(threadIdx.x) % kVectorsOfRow * kVector;
    int const first_row = work.m_block * Traits::kTileM + int(threadIdx.x) / kVectorsOfRow;
    int const end_row = min_of((work.m_block + 1) * Traits::kTileM, params.seqlen_q);
    Element* const head = static_cast<Element*>(grad.data) + work.batch * grad.batch_stride +
                          work.head * grad.head_stride;
    for (int n_block = 0; n_block * Traits::kTileN < params.seqlen_k; ++n_block) {
      MTiles const steps = steps_of(params, n_block);
      int const key = n_block * Traits::kTileN + col;
      if ((steps.begin <= work.m_block && work.m_block < steps.end) || key >= params.seqlen_k) {
        continue;
      }
      for (int row = first_row; row < end_row; row += kRowsAtOnce) {
        clear(head + row * grad.row_stride + key, params.seqlen_k - key);
      }
    }
  }

 private:
  CUTE_HOST_DEVICE static MTiles steps_of(BackwardParams const& params, int32_t n_block) {
    Sequence const sequence = make_sequence(params.seqlen_q, params.seqlen_k, 0, 0,
                                            params.window_left, params.window_right);
    return m_tiles(sequence, n_block * Traits::kTileN, Traits::kTileN, Traits::kTileM);
  }

  CUTE_DEVICE static void clear(Element* numbers, int32_t count) {
    if (count >= kVector) {
      *reinterpret_cast<uint4*>(numbers) = uint4{};
    } else {
      for (int i = 0; i < count; ++i) {
        numbers[i] = Element(0);
      }
    }
  }
};

}  // namespace cute_attention::sm90
