// core/backward_steps.h: in which order a CTA of the backward pass takes the tiles of queries that
// see its block of keys: one query head of the kv head's group after the other, and the tiles of a
// head from the last to the first.
#pragma once

#include "cute_attention/core/address.h"
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

  CUTE_DEVICE BackwardSteps(BackwardParams const& params, GradTile const& tile,
                            Sequence const& sequence, MTiles const& tiles)
      : params_(params), tile_(tile), sequence_(sequence), tiles_(tiles) {}

  CUTE_DEVICE int count() const { return tiles_.count() * group(); }
  CUTE_DEVICE Step first() const { return last_tile(tile_.head_kv * group()); }

  // Moves to the next step; after the last step the result must not be used. Within a head this is
  // done by additions: products with 64-bit strides would take some 60 instructions.
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
};

}  // namespace cute_attention
