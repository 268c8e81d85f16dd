// core/backward_steps.h: in which order a CTA of the backward pass takes the tiles of queries that
// see its block of keys: one query head of the kv head's group after the other, and the tiles of a
// head from the last to the first. A part of the block's steps is a piece of this order.
#pragma once

#include "cute_attention/core/address.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/m_tiles.h"

namespace cute_attention {

// One step: a tile of queries of one head. All threads of the CTA have the same values.
template <class Element>
struct BackwardStep {
  int head;
  int m_block;
  int64_t grad_q_block;   // the tile's block of the sums of dQ
  int64_t row;            // index of the tile's first number in the LSE and in delta
  Element const* q;       // first row of the tile in q
  Element const* grad_o;  // first row of the tile in grad_o
};

template <class Element, int kTileM>
class BackwardSteps {
 public:
  using Step = BackwardStep<Element>;

  CUTE_HOST_DEVICE BackwardSteps(BackwardParams const& params, GradTile const& tile,
                                 Sequence const& sequence, MTiles const& tiles,
                                 StepRange const& range)
      : params_(params), tile_(tile), sequence_(sequence), tiles_(tiles), range_(range) {}

  CUTE_HOST_DEVICE int count() const { return range_.count; }
  CUTE_HOST_DEVICE Step first() const { return step_of(range_.head, range_.m_block); }

  // The same for who needs no more than the head and the tile: it keeps fewer numbers.
  CUTE_HOST_DEVICE void advance(int32_t& head, int32_t& m_block) const {
    if (m_block > tiles_.begin) {
      --m_block;
    } else {
      ++head;
      m_block = tiles_.end - 1;
    }
  }
  // The block of a tile of queries in the sums of dQ.
  CUTE_HOST_DEVICE int64_t grad_q_block(int32_t head, int32_t m_block) const {
    return first_grad_q_block(params_, sequence_, tile_.batch, head, kTileM) + m_block;
  }

  // Moves to the next step; after the last step the result must not be used. Within a head this is
  // done by additions: products with 64-bit strides would take some 60 instructions.
  CUTE_HOST_DEVICE void advance(Step& step) const {
    if (step.m_block > tiles_.begin) {
      --step.m_block;
      --step.grad_q_block;
      step.q -= kTileM * params_.q_stride.row;
      step.grad_o -= kTileM * params_.grad_o_stride.row;
      step.row -= kTileM;
    } else {
      step = step_of(step.head + 1, tiles_.end - 1);
    }
  }

 private:
  CUTE_HOST_DEVICE Step step_of(int head, int m_block) const {
    int64_t const query = int64_t(m_block) * kTileM;
    int64_t const row = sequence_.row_q + query;
    return {head,
            m_block,
            grad_q_block(head, m_block),
            lse_index(params_, sequence_, tile_.batch, head, query),
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
