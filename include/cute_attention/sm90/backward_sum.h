// sm90/backward_sum.h: the warps that add dQ of each step to its sums in global memory.
#pragma once

#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/cta_turn.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm90/backward_states.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/bulk_copy.h"

namespace cute_attention::sm90 {

// Adds what one warpgroup computes of dQ of each step. One lane of a warp does it all: the
// consumers do not wait for sums that are under way.
template <class Row>
CUTE_DEVICE void add_grad_queries(BackwardArguments const& arguments,
                                  typename BackwardTraits<Row>::SharedMemory& shared, int part) {
  using Traits = BackwardTraits<Row>;
  constexpr int kNumbers = Traits::kTileM * Traits::kHeadDim;
  constexpr int kPartNumbers = kNumbers / Traits::kConsumers;
  if (!cute::elect_one_sync()) {
    return;
  }
  await_kernel_before();  // backward_load.h lists what it writes
  BackwardParams const& params = arguments.params;
  bool const stores_first = Traits::kStoresFirst && arguments.sum_states != nullptr;
  Ring<1> ring{};  // of dQ in shared memory
  bool has_steps = false;
  for (int32_t works = 0;; ++works) {
    Ring<kWorkSlots> const slot = buffer_of<kWorkSlots>(works);
    Barrier::wait(&shared.work_full[slot.stage], slot.parity);
    BackwardWork const& work = shared.works[slot.stage];
    if (work.is_end()) {
      break;
    }
    BackwardSteps<typename Traits::Element, Traits::kTileM, Traits::kMayGoUp> const steps(
        params, work.tile, work.sequence, work.steps);
    int remaining = steps.count();
    // Where dQ is late, the first is of a step that does not exist (backward_compute.h), unless the
    // block before leaves it the dQ of its last step.
    bool const has_before = Traits::kOverlapsBlocks && has_steps;
    has_steps = remaining > 0;
    if (Traits::kGradQLag > 0 && remaining > 0 && !has_before) {
      Barrier::wait(&shared.grad_q_full[part], ring.parity);
      Barrier::arrive(&shared.grad_q_empty[part]);
      ring.advance();
    }
    int32_t head = work.steps.head;
    int32_t m_block = work.steps.m_block;
    for (; remaining > 0; --remaining) {
      // A block takes at least 32 KB of memory: there are fewer than 2^31.
      int32_t const block = int32_t(steps.grad_q_block(head, m_block));
      // Opaque, so that addresses are computed here: the warp has no registers to keep them.
      int const part_of_sums = opaque(part);
      // Computed at each use. If the address stayed in registers beside the wait for dQ, the warp
      // would need more than it has; ptxas then allocates the registers of the whole kernel in
      // another way, and the consumers spill.
      auto const state = [&] {
        return arguments.sum_states + opaque(block) * Traits::kConsumers + part_of_sums;
      };
      bool written = true;
      // The turn, or the state, is read before dQ is awaited, so that the latency of that load
      // passes beside the products.
      if (params.grad_q_turn != nullptr) {
        KvTiles const keys =
            kv_tiles(work.sequence, m_block * Traits::kTileM, Traits::kTileM, Traits::kTileN);
        // The parts of a CTA have their turn together: each ends one.
        int32_t const turn = (work.tile.n_block - keys.begin) * Traits::kConsumers;
        while (load_acquire(params.grad_q_turn + block) < turn) {
        }
        written = !stores_first || turn > 0;
      } else if (stores_first) {
        written = load_acquire(state()) == kSumWritten;
      }
      Barrier::wait(&shared.grad_q_full[part], ring.parity);
      float* const sums =
          params.grad_q_sum + int64_t{block} * kNumbers + part_of_sums * kPartNumbers;
      constexpr int kBytes = kPartNumbers * int(sizeof(float));
      if (!written && claims_first(state())) {
        start_bulk_store(sums, shared.grad_q[part], kBytes);
        await_bulk_writes();
        fence_bulk_adds();
        store_release(state(), kSumWritten);
      } else {
        if (stores_first) {
          fence_bulk_adds();
        }
        start_bulk_add(sums, shared.grad_q[part], kBytes);
        await_bulk_reads();
      }
      Barrier::arrive(&shared.grad_q_empty[part]);
      if (params.grad_q_turn != nullptr) {
        await_bulk_writes();
        end_turn(params.grad_q_turn + opaque(block));
      }
      ring.advance();
      steps.advance(head, m_block);
    }
    Barrier::arrive(&shared.work_empty[buffer_of<kWorkSlots>(opaque(works)).stage]);
  }
  await_bulk_writes();
}

}  // namespace cute_attention::sm90
