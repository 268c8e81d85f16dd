// core/backward_steps.h: in which order a CTA of the backward pass takes the tiles of queries that
// see its block of keys (GradSchedule::order()): down, from the last tile to the first, or up. Each
// tile is taken of all query heads of the part (core/grad_parts.h) before the next one. With a
// window one head is taken after the other instead.
//
// Without a window: the CTAs of a KV head that begin together stay together, although under a
// causal mask the blocks of the first keys have more tiles than the others: these end sooner. If a
// CTA took one head after the other, it would come to the next head before the longer blocks do.
// Where dQ is summed in a fixed order it would wait for them there, in each head anew. In a
// simulation of 8192 tokens, causal, on 132 SMs the backward then takes 1.46 times as many steps
// with 64 heads over 4, and 1.15 with 32 over 8.
//
// With a window the blocks begin at different tiles, and most have as many. CTAs that run together
// are then never at the same tile, so that L2 has to hold all tiles that they go through. It can
// hold those of one query head of each KV head, but not those of all query heads.
#pragma once

#include "cute_attention/core/address.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/core/grad_tile.h"

namespace cute_attention {

// One step: a tile of queries of one head. All threads of the CTA have the same values.
template <class Element>
struct BackwardStep {
  int head;
  int m_block;
  int64_t grad_q_block;   // the tile's block of the sums of dQ
  int64_t row;            // number_index() of the tile's first query
  Element const* q;       // first row of the tile in q
  Element const* grad_o;  // first row of the tile in grad_o
};

//   kAnyOrder  whether steps may go up, or head after head; where they may not, that takes no
//              register
//   kPadded    whether the numbers of queries are padded (core/grad_tile.h)
template <class Element, int kTileM, bool kAnyOrder = false, bool kPadded = false>
class BackwardSteps {
 public:
  using Step = BackwardStep<Element>;

  //   tiles  that see the block of keys
  CUTE_HOST_DEVICE BackwardSteps(BackwardParams const& params, GradTile const& tile,
                                 Sequence const& sequence, MTiles const& tiles,
                                 StepRange const& range)
      : params_(params), tile_(tile), sequence_(sequence), tiles_(tiles), range_(range) {}

  CUTE_HOST_DEVICE int count() const { return range_.count; }
  CUTE_HOST_DEVICE Step first() const { return step_of(range_.head, range_.m_block); }

  // The same for who needs no more than the head and the tile: it keeps fewer numbers.
  CUTE_HOST_DEVICE void advance(int32_t& head, int32_t& m_block) const {
    if (kAnyOrder && range_.order == StepOrder::HeadAfterHead) {
      if (--m_block < tiles_.begin) {
        m_block = tiles_.end - 1;
        ++head;
      }
    } else if (++head == range_.head_end) {
      head = range_.head_begin;
      m_block += m_step();
    }
  }
  // The block of a tile of queries in the sums of dQ.
  CUTE_HOST_DEVICE int64_t grad_q_block(int32_t head, int32_t m_block) const {
    return first_grad_q_block(params_, sequence_, tile_.batch, head, kTileM) + m_block;
  }

  // Moves to the next step; after the last step the result must not be used. To the next tile of a
  // head this is done by additions: products with 64-bit strides take some 60 instructions. From
  // head to head, too, additions would do, but the distances that they add are numbers that the
  // sm80 kernel of head dim 128 has no registers for: it spilled 40 bytes.
  CUTE_HOST_DEVICE void advance(Step& step) const {
    int32_t head = step.head, m_block = step.m_block;
    advance(head, m_block);
    if (head != step.head) {
      step = step_of(head, m_block);
    } else {
      int64_t const rows = m_step() * kTileM;
      step.m_block += m_step();
      step.grad_q_block += m_step();
      step.q += rows * params_.q_stride.row;
      step.grad_o += rows * params_.grad_o_stride.row;
      step.row += rows;
    }
  }

 private:
  CUTE_HOST_DEVICE int32_t m_step() const {
    return kAnyOrder && range_.order == StepOrder::Up ? 1 : -1;
  }

  CUTE_HOST_DEVICE Step step_of(int head, int m_block) const {
    int64_t const query = int64_t(m_block) * kTileM;
    int64_t const row = sequence_.row_q + query;
    return {head,
            m_block,
            grad_q_block(head, m_block),
            number_index<kPadded>(params_, sequence_, tile_.batch, head, query),
            row_pointer(static_cast<Element const*>(params_.q), params_.q_stride, tile_.batch, head,
                        row),
            row_pointer(static_cast<Element const*>(params_.grad_o), params_.grad_o_stride,
                        tile_.batch, head, row)};
  }

  BackwardParams const& params_;
  GradTile const& tile_;
  Sequence const& sequence_;
  MTiles const& tiles_;
  StepRange const& range_;
};

}  // namespace cute_attention
