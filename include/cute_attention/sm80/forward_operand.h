// sm80/forward_operand.h: the operands of the forward's products that lie in shared memory, and the
// accumulators that go there.
#pragma once

#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/smem_operand.h"

namespace cute_attention::sm80 {

template <class Traits>
struct ForwardOperands {
  static constexpr int kRow = kSwizzleCols<Traits::kHeadDim>;
  static constexpr int kRowV = kSwizzleCols<Traits::kHeadDimV>;
  static constexpr int kRowP = kSwizzleCols<Traits::kTileN>;

  // S = Q K^T.
  using Q = SmemOperand<typename Traits::SmemCopyQ, typename Traits::SmemLayoutQ, kRow, false>;
  using K = SmemOperand<typename Traits::SmemCopyK, typename Traits::SmemLayoutK, kRow, false>;
  // O += P V. P is an operand in shared memory only where several warps divide the keys of a tile.
  using V = SmemOperand<typename Traits::SmemCopyV, typename Traits::SmemLayoutVt, kRowV, true>;
  using P = SmemOperand<typename Traits::SmemCopyP, typename Traits::SmemLayoutP, kRowP, false>;
  using PlaceOfP = SmemAccumulator<typename Traits::TiledMma, typename Traits::SmemLayoutP, kRowP,
                                   typename Traits::Element>;
  using PlaceOfO = SmemAccumulator<typename Traits::TiledMma, typename Traits::SmemLayoutO, kRowV,
                                   typename Traits::Element>;
};

}  // namespace cute_attention::sm80
