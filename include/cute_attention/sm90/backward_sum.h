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

// One of the warps that add dQ, of which there is one for each consumer warpgroup. One lane does it
// all: the consumers do not wait for sums that are under way.
//
// In any order, warp w adds the part of dQ that warpgroup w has computed, of each step. In a fixed
// order a warp also waits until its additions are done, and then lets the next CTA add to the same
// sums, which together takes about as long as a step. So there it adds all parts of every second
// step, and has the time of two steps for them.
template <class Row>
struct GradQueryAdder {
  using Traits = BackwardTraits<Row>;
  using Steps = BackwardSteps<typename Traits::Element, Traits::kTileM, Traits::kAnyOrder>;
  static constexpr int kParts = Traits::kConsumers;
  static constexpr int kNumbers = Traits::kTileM * Traits::kHeadDim;
  static constexpr int kPartNumbers = Traits::kPartNumbers;
  static_assert(kParts == 2,
                "in a fixed order one warp has the even steps, the other the odd ones");

  BackwardArguments const& arguments;
  typename Traits::SharedMemory& shared;
  int const warp;
  uint32_t number = 0;  // of the dQ that comes next

  CUTE_DEVICE void run() {
    bool has_steps = false;
    keep_head(-1);
    for (int32_t works = 0;; ++works) {
      Ring<kWorkSlots> const slot = buffer_of<kWorkSlots>(works);
      Barrier::wait(&shared.work_full[slot.stage], slot.parity);
      BackwardWork const& work = shared.works[slot.stage];
      if (work.is_end()) {
        break;
      }
      // Where dQ is late, the first is of a step that does not exist (backward_compute.h), unless
      // the block before leaves it the dQ of its last step.
      bool const has_before = Traits::kOverlapsBlocks && has_steps;
      has_steps = work.steps.count > 0;
      bool const skips = Traits::kGradQLag > 0 && has_steps && !has_before;
      if (arguments.params.grad_q_turn == nullptr) {
        add_steps<false>(work, skips);
      } else {
        add_steps<true>(work, skips);
      }
      keep_head(counted_head(work));
      Barrier::arrive(&shared.work_empty[buffer_of<kWorkSlots>(opaque(works)).stage]);
    }
    count_block();
    await_bulk_writes();
    if constexpr (Traits::kCountsHeads) {
      Barrier::arrive(&shared.writer.ended);
    }
  }

 private:
  // The KV head, of those of all sequences, for which a block counts (CompleteHeads), or -1. Blocks
  // that are divided do not count: their heads are never complete before the kernel ends.
  CUTE_DEVICE int32_t counted_head(BackwardWork const& work) const {
    if (!Traits::kCountsHeads || arguments.complete.left == nullptr ||
        arguments.schedule.is_divided(work.tile)) {
      return -1;
    }
    return work.tile.batch * arguments.schedule.heads_kv + work.tile.head_kv;
  }

  // That of the block before lies in shared memory: there is no register to keep it.
  CUTE_DEVICE void keep_head(int32_t head) {
    if constexpr (Traits::kCountsHeads) {
      shared.writer.counted_head[opaque(warp)] = head;
    }
  }

  // Tells the warps that write dQ (sm90/grad_q_writer.h) that the block before has added its parts.
  // That is a step late where it can be: then its additions have ended, and nobody waits for this
  // warp while it waits for its release to be seen by all.
  CUTE_DEVICE void count_block() {
    if constexpr (Traits::kCountsHeads) {
      int32_t const head = shared.writer.counted_head[opaque(warp)];
      if (head >= 0) {
        await_bulk_writes();
        fence_bulk_adds();
        add_release(arguments.complete.left + head, -1);
      }
    }
  }

  //   kInOrder  whether dQ is summed in a fixed order
  //   skips     whether a dQ of no step comes first
  template <bool kInOrder>
  CUTE_DEVICE void add_steps(BackwardWork const& work, bool skips) {
    BackwardParams const& params = arguments.params;
    bool const stores_first = Traits::kStoresFirst && arguments.sum_states != nullptr;
    if (skips) {
      take_parts<kInOrder>([] {}, [](int) {}, [] {});
    }
    count_block();
    Steps const steps(params, work.tile, work.sequence, work.tiles, work.steps);
    int32_t head = work.steps.head;
    int32_t m_block = work.steps.m_block;
    // The warp has no registers for more than one step at a time.
    CUTE_NO_UNROLL
    for (int remaining = steps.count(); remaining > 0; --remaining) {
      // A block takes at least 32 KB of memory: there are fewer than 2^31.
      int32_t const block = int32_t(steps.grad_q_block(head, m_block));
      // Computed at each use. If the address stayed in registers beside the wait for dQ, the warp
      // would need more than it has; ptxas then allocates the registers of the whole kernel in
      // another way, and the consumers spill.
      auto const state = [&](int part) {
        return arguments.sum_states + opaque(block) * kParts + part;
      };
      bool written = true;
      take_parts<kInOrder>(
          // The turn, or the state, is read before dQ is awaited, so that the latency of that load
          // passes beside the products.
          [&] {
            if constexpr (kInOrder) {
              KvTiles const keys =
                  kv_tiles(work.sequence, m_block * Traits::kTileM, Traits::kTileM, Traits::kTileN);
              int32_t const turn = work.tile.n_block - keys.begin;
              while (load_acquire(params.grad_q_turn + block) < turn) {
              }
              written = !stores_first || turn > 0;
            } else if (stores_first) {
              written = load_acquire(state(opaque(warp))) == kSumWritten;
            }
          },
          [&](int part) {
            float* const sums = params.grad_q_sum + int64_t{block} * kNumbers + part * kPartNumbers;
            constexpr int kBytes = kPartNumbers * int(sizeof(float));
            if (!written && claims_first(state(part))) {
              start_bulk_store(sums, shared.grad_q[part], kBytes);
              await_bulk_writes();
              fence_bulk_adds();
              store_release(state(part), kSumWritten);
            } else {
              if (stores_first) {
                fence_bulk_adds();
              }
              start_bulk_add(sums, shared.grad_q[part], kBytes);
              await_bulk_reads();
            }
          },
          [&] {
            await_bulk_writes();
            end_turn(params.grad_q_turn + opaque(block));
          });
      steps.advance(head, m_block);
    }
  }

  // Goes on by one dQ, and takes those parts of it that are this warp's, if there are any: calls
  // begin(), then take(part) when the part is there, and, in a fixed order, end().
  template <bool kInOrder, class Begin, class Take, class End>
  CUTE_DEVICE void take_parts(Begin const& begin, Take const& take, End const& end) {
    if constexpr (!kInOrder) {
      begin();
      take_part(opaque(warp), take);
    } else if (int(number % 2) == warp) {
      begin();
      // Not before the other warp has taken the parts of the step before: a warp tells phases of a
      // barrier apart by their parity alone. The first step of all awaits nothing. The addresses
      // are computed here (opaque()), since the warp has no registers to keep them.
      uint32_t const parity = (number / 2 ^ number ^ 1) % 2;
      Barrier::wait(&shared.adder_turn[opaque(warp)], parity);
      CUTE_NO_UNROLL
      for (int part = 0; part < kParts; ++part) {
        take_part(opaque(part), take);
      }
      Barrier::arrive(&shared.adder_turn[opaque(warp) ^ 1]);
      end();
    }
    ++number;
  }

  template <class Take>
  CUTE_DEVICE void take_part(int part, Take const& take) {
    Barrier::wait(&shared.grad_q_full[part], number % 2);
    take(part);
    Barrier::arrive(&shared.grad_q_empty[part]);
  }
};

template <class Row>
CUTE_DEVICE void add_grad_queries(BackwardArguments const& arguments,
                                  typename BackwardTraits<Row>::SharedMemory& shared, int warp) {
  if (cute::elect_one_sync()) {
    await_kernel_before();  // backward_load.h lists what it writes
    GradQueryAdder<Row>{arguments, shared, warp}.run();
  }
}

}  // namespace cute_attention::sm90
