// core/backward_steps.h: the steps of a CTA of the backward pass: the tiles of queries that see its
// block of keys, from the last to the first, of one query head after the other of those that share
// the kv head.
#pragma once

#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention {

// One tile of queries of one head. All members are the same in all threads of the CTA.
template <class Element>
struct BackwardStep {
  int head;
  int m_block;
  int64_t grad_q_block;   // of the sums of dQ
  int64_t row;            // the tile's first of LSE and delta
  Element const* q;       // its first row
  Element const* grad_o;  // likewise
};

template <class Element, int kTileM>
class BackwardSteps {
 public:
  using Step = BackwardStep<Element>;

  CUTE_DEVICE BackwardSteps(BackwardParams const& params, GradTile const& tile,
                            Sequence const& sequence, MTiles const& tiles)
      : params_(params), tile_(tile), sequence_(sequence), tiles_(tiles) {}

  CUTE_DEVICE int count() const { return tiles_.count() * group(); }
  CUTE_DEVICE Step first() const { return last_tile(tile_.head_kv * group()); }

  // Moves to the step that follows, if there is one: within a head by additions alone, where
  // products with strides of 64 bits would be some 60 instructions.
  CUTE_DEVICE void advance(Step& step) const {
    if (step.m_block > tiles_.begin) {
      --step.m_block;
      --step.grad_q_block;
      step.q -= kTileM * params_.q_stride.row;
      step.grad_o -= kTileM * params_.grad_o_stride.row;
      step.row -= kTileM;
    } else {
      step = last_tile(step.head + 1);
    }
  }

 private:
  CUTE_DEVICE int group() const { return params_.heads / params_.heads_kv; }

  CUTE_DEVICE Step last_tile(int head) const {
    int const m_block = tiles_.end - 1;
    int64_t const query = int64_t(m_block) * kTileM;
    int64_t const row = sequence_.row_q + query;
    return {head,
            m_block,
            first_grad_q_block(params_, sequence_, tile_.batch, head, kTileM) + m_block,
            lse_offset(params_, WorkTile{m_block, head, tile_.batch}, sequence_) + query,
            static_cast<Element const*>(params_.q) + tile_.batch * params_.q_stride.batch +
                head * params_.q_stride.head + row * params_.q_stride.row,
            static_cast<Element const*>(params_.grad_o) +
                tile_.batch * params_.grad_o_stride.batch + head * params_.grad_o_stride.head +
                row * params_.grad_o_stride.row};
  }

  BackwardParams const& params_;
  GradTile const& tile_;
  Sequence const& sequence_;
  MTiles const& tiles_;
};

}  // namespace cute_attention
