// sm90/backward_load.h: the load warp: it takes one block of keys after the other, and loads its K
// and V, and Q with the LSE and dO with delta of its steps, as far ahead as there are buffers.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/backward_steps.h"
#include "cute_attention/core/call_features.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/sm90/work_load.h"

namespace cute_attention::sm90 {

//   Traits  BackwardTraits or GradKvTraits
template <class Traits>
struct BackwardLoad : WorkLoad<BackwardWork, typename Traits::SharedMemory, BackwardLoad<Traits>> {
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Base = WorkLoad<BackwardWork, SharedMemory, BackwardLoad>;
  using Base::arguments, Base::blocks, Base::leader, Base::mended, Base::shared, Base::work;
  using Step = BackwardStep<Element>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr uint32_t kScoreMods = Traits::kKey.score_mods;

  // Whether the kernel may begin before backward_prepare has ended. What that one writes is
  //
  //   LSE and delta     read by this warp alone, which waits before the first of each block, when
  //                     K, V, Q and dO of the first step are on their way
  //   the work counter  read by this warp alone: taken_index() waits
  //   sums of dQ, and their states and turns
  //                     read and added to by the warps that add, which wait before anything else.
  //                     (In most kernels a first state is read when the LSE has been, anyway;
  //                     but in chunks the first dQ, which is of no step, asks for K alone.)
  //   gradients         of packed rows; where a sequence is longer than params.seqlen_k, of rows
  //                     that this kernel writes, too: of packed calls this warp waits before
  //                     anything else
  //
  // What this warp loads before it waits, nobody writes meanwhile: the launch of backward_prepare
  // itself waits for all kernels before it.
  static constexpr bool kBeginsEarly = Traits::kBeginsEarly;

  Ring<Traits::kStages> ring{};
  Ring<Traits::kStagesK> ring_k{};

  CUTE_DEVICE BackwardLoad(BackwardArguments const& arguments, SharedMemory& shared)
      : Base(arguments, shared, {arguments.params.cu_seqlens_k, arguments.params.batch, kTileN}) {}

  // Where dQ is summed in a fixed order, a CTA waits for those that have blocks of lower numbers.
  // These must have begun: so no CTA has a block before it runs. In any other order its first block
  // is the one of its own number.
  CUTE_DEVICE bool in_order() const { return arguments.params.grad_q_turn != nullptr; }

  CUTE_DEVICE int32_t first_index() const {
    if (kBeginsEarly && arguments.params.cu_seqlens_k != nullptr) {
      await_kernel_before();
    }
    return in_order() ? taken_index() : int32_t(blockIdx.x);
  }
  CUTE_DEVICE int32_t next_index() const { return Traits::kOneTile ? INT32_MAX : taken_index(); }
  CUTE_DEVICE int32_t taken_index() const {
    if constexpr (kBeginsEarly) {
      await_kernel_before();  // it sets the counter to 0
    }
    int32_t taken = Base::take(arguments.next_tile);
    if (!in_order()) {
      taken += ctas_anew();
    }
    return taken;
  }

  // Part number `index` of all blocks, or the end. The blocks of packed sequences are counted on
  // the device, one sequence after the other: those that shorter sequences do not have are not
  // counted.
  CUTE_DEVICE BackwardWork work_from(int32_t index) {
    BackwardParams const& params = arguments.params;
    BackwardWork next;
    next.tile.n_block = -1;
    if (params.cu_seqlens_k == nullptr) {
      if (index < int32_t(arguments.schedule.tiles())) {
        next.tile = arguments.schedule.tile(index);
        next.sequence = load_sequence(params, next.tile.batch);
      }
    } else {
      int32_t const parts = arguments.schedule.parts.count;
      int32_t const of_a_block = params.heads_kv * parts;
      PackedBlock const block = blocks.find(index / of_a_block);
      if (block.batch < params.batch) {
        next.sequence = load_sequence(params, block.batch);
        int32_t const n_blocks = ceil_div(next.sequence.seqlen_k, kTileN);
        next.tile = {n_blocks - 1 - block.after, index % of_a_block / parts, block.batch,
                     index % parts};
      }
    }
    if (!next.is_end()) {
      next.tiles = m_tiles(next.sequence, next.tile.n_block * kTileN, kTileN, kTileM);
      next.steps =
          steps_of_part(next.tiles, next.tile, arguments.schedule.parts_of(index),
                        Traits::kAnyOrder ? arguments.schedule.order(index) : StepOrder::Down);
    }
    return next;
  }

  // The first queries are loaded before K and V: their buffers are free sooner.
  CUTE_DEVICE void load_work() {
    BackwardSteps<Element, kTileM, Traits::kAnyOrder, true> const steps(
        arguments.params, work->tile, work->sequence, work->tiles, work->steps);
    int const count = steps.count();
    if (count == 0) {
      return;
    }
    Step step = steps.first();
    if constexpr (kBeginsEarly) {
      // One place for each load: what is inlined twice takes twice the instruction cache. The
      // kernel with sums that does not begin early spills in this form, and has the other one.
      for (int index = 0;;) {
        load_queries(step);
        if (index == 0) {
          load_keys();
          load_values();
          await_kernel_before();
        }
        load_numbers(step);
        ring.advance();
        if (++index == count) {
          return;
        }
        steps.advance(step);
      }
    } else {
      load_step(step);
      load_keys();
      load_values();
      for (int index = 1; index < count; ++index) {
        steps.advance(step);
        load_step(step);
      }
    }
  }

 private:
  CUTE_DEVICE void load_step(Step const& step) {
    load_queries(step);
    load_numbers(step);
    ring.advance();
  }

  CUTE_DEVICE TileOrigin origin_k() const {
    bool const packed = arguments.params.cu_seqlens_k != nullptr;
    return {packed ? 0 : work->tile.batch, work->tile.head_kv, 0, int32_t(work->sequence.row_k)};
  }

  CUTE_DEVICE void load_keys() {
    Barrier::wait(&shared.key_empty[ring_k.stage], ring_k.parity ^ 1);
    load_rows_of_keys<Traits::kHeadDim, Traits::kBoxColsK>(
        arguments.map_k, shared.k.data() + ring_k.stage * (Traits::kBytesK / int(sizeof(Element))),
        key_full());
    ring_k.advance();
  }
  // Comes after load_keys(): ring_k also says which phase the buffer of V is in.
  CUTE_DEVICE void load_values() {
    static_assert(Traits::kStagesK <= 2, "one bit of the number of blocks");
    Barrier::wait(&shared.value_empty, Traits::kStagesK == 1 ? ring_k.parity : ring_k.stage);
    load_rows_of_keys<Traits::kHeadDimV, Traits::kBoxV>(arguments.map_v, shared.v.data(),
                                                        value_full());
  }
  // The barriers that tell of K and V of a block. Where blocks overlap these are those of Q and dO
  // of its first step, for which a step waits anyway; who loads K and V does not arrive there.
  CUTE_DEVICE uint64_t& key_full() const {
    return Traits::kOverlapsBlocks ? shared.query_full[ring.stage] : shared.key_full[ring_k.stage];
  }
  CUTE_DEVICE uint64_t& value_full() const {
    return Traits::kOverlapsBlocks ? shared.grad_o_full[ring.stage] : shared.value_full;
  }
  template <int kCols, int kBox>
  CUTE_DEVICE void load_rows_of_keys(CUtensorMap const& map, Element* buffer, uint64_t& full) {
    int32_t const n_begin = work->tile.n_block * kTileN;
    mended.template load<kTileN, kCols, kBox, !Traits::kOverlapsBlocks>(
        map, origin_k(), n_begin, work->sequence.seqlen_k - n_begin,
        arguments.params.cu_seqlens_k != nullptr, buffer, full);
  }

  // Loads Q and dO of a step, from the same place of both tensors.
  CUTE_DEVICE void load_queries(Step const& step) {
    int32_t const m_begin = step.m_block * kTileM;
    int32_t const rows = work->sequence.seqlen_q - m_begin;
    bool const packed = arguments.params.cu_seqlens_q != nullptr;
    TileOrigin const origin{packed ? 0 : work->tile.batch, step.head, 0,
                            int32_t(work->sequence.row_q)};
    Barrier::wait(&shared.query_empty[ring.stage], ring.parity ^ 1);
    uint64_t& full = shared.query_full[ring.stage];
    auto& stage = shared.stages[ring.stage];
    if (leader) {
      if constexpr (Traits::kBiasTiles && !Traits::kBiasOfWarpgroups) {
        if (call_has<kScoreMods, score_mods::Bias>(arguments.params)) {
          load_bias_tile<kTileM, kTileN>(
              arguments.bias,
              {work->tile.batch, step.head, 0, m_begin, work->tile.n_block * kTileN},
              shared.bias_tile(ring.stage), full);
        }
      }
      if constexpr (!Traits::kBiasTiles || (kScoreMods & score_mods::Alibi) != 0) {
        using OfHead = typename std::remove_reference_t<decltype(stage)>::OfHead;
        static_cast<OfHead&>(stage) =
            BackwardScores<kScoreMods>::of_head(arguments.params, work->tile.batch, step.head);
      }
      stage.m_block = step.m_block;
      if constexpr (Traits::kHasSums) {
        shared.step_tiles[tile_slot(ring)] = {step.head, step.m_block};
      }
    }
    if constexpr (has_dropout(kScoreMods)) {
      int const lane = lane_of_warp();
      if (lane < stage.kWriters && call_has<kScoreMods, score_mods::Dropout>(arguments.params)) {
        stage.write(arguments.params, work->tile.batch, step.head, m_begin, lane);
      }
      __syncwarp();  // all lanes have written, before the leader tells of it
    }
    mended.template load<kTileM, Traits::kHeadDim, Traits::kBox>(
        arguments.map_q, origin, m_begin, rows, packed,
        shared.q.data() + ring.stage * (Traits::kBytesQ / int(sizeof(Element))), full);
    if constexpr (Traits::kBiasOfWarpgroups) {
      load_warpgroup_bias(step, m_begin);
    }
    Barrier::wait(&shared.grad_o_empty[ring.stage], ring.parity ^ 1);
    mended.template load<kTileM, Traits::kHeadDimV, Traits::kBoxV>(
        arguments.map_grad_o, origin, m_begin, rows, packed,
        shared.grad_o.data() + ring.stage * (Traits::kBytesGradO / int(sizeof(Element))),
        shared.grad_o_full[ring.stage]);
  }

  // Comes after Q, which need not wait until the consumers are done with the bias of the step
  // before. Which phase: await_bias() of sm90/backward_pointwise.h.
  CUTE_DEVICE void load_warpgroup_bias(Step const& step, int m_begin) {
#pragma unroll 1  // few registers
    for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup) {
      Barrier::wait(&shared.bias_barriers.empty[warpgroup], ring.stage ^ 1);
      if (leader) {
        constexpr int kCols = Traits::kBiasCols;
        uint64_t& full = shared.bias_barriers.full[warpgroup];
        int32_t const col = (work->tile.n_block * Traits::kConsumers + warpgroup) * kCols;
        load_bias_tile<kTileM, kCols>(arguments.bias,
                                      {work->tile.batch, step.head, 0, m_begin, col},
                                      shared.bias_tile(warpgroup), full);
        Barrier::arrive(&full);
      }
    }
  }

  // Loads the LSE and delta of a step's queries. Behind the last query of a sequence are numbers
  // too (core/backward_prepare.h).
  CUTE_DEVICE void load_numbers(Step const& step) {
    if (leader) {
      load_numbers(arguments.lse_log2 + step.row, shared.lse[ring.stage],
                   shared.query_full[ring.stage]);
      load_numbers(arguments.params.delta + step.row, shared.delta[ring.stage],
                   shared.grad_o_full[ring.stage]);
    }
  }
  CUTE_DEVICE static void load_numbers(float const* source, float* target, uint64_t& full) {
    constexpr int kBytes = kTileM * int(sizeof(float));
    Barrier::arrive_and_expect_tx(&full, kBytes);
    cute::SM90_BULK_COPY_G2S::copy(source, &full, target, kBytes);
  }
};

}  // namespace cute_attention::sm90
