// sm80/backward_operand.h: the operands of the backward's products that lie in shared memory; how P
// and dS in registers become operands of the next products, and how other warps get them.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/sm80/backward_traits.h"
#include "cute_attention/sm80/smem_operand.h"

namespace cute_attention::sm80 {

template <class Traits>
struct BackwardOperands {
  static constexpr int kRow = kSwizzleCols<Traits::kHeadDim>;
  static constexpr int kRowV = kSwizzleCols<Traits::kHeadDimV>;
  static constexpr int kRowP = Traits::kRowP;
  static constexpr int kPartM = Traits::kPartM;
  static constexpr int kBytes = int(sizeof(typename Traits::Element));
  template <class TiledCopy, class SmemLayout, int kElements>
  using Straight = SmemOperand<TiledCopy, SmemLayout, kElements, false>;
  template <class TiledCopy, class SmemLayout, int kElements>
  using Transposed = SmemOperand<TiledCopy, SmemLayout, kElements, true>;

  // S^T = K Q^T and dP^T = V dO^T.
  using K = Straight<typename Traits::SmemCopyK, typename Traits::SmemLayoutK, kRow>;
  using Q = Straight<typename Traits::SmemCopyQ, typename Traits::SmemLayoutQ, kRow>;
  using V = Straight<typename Traits::SmemCopyK, typename Traits::SmemLayoutV, kRowV>;
  using GradO = Straight<typename Traits::SmemCopyQ, typename Traits::SmemLayoutGradO, kRowV>;
  // dV += P^T dO and dK += dS^T Q: the part of each operand that has the kPartM queries of one
  // column of warps.
  using P =
      SmemOperand<typename Traits::SmemCopyP, typename Traits::SmemLayoutP, kRowP, false, kPartM>;
  using Qt =
      SmemOperand<typename Traits::SmemCopyQt, typename Traits::SmemLayoutQt, kRow, true, kPartM>;
  using GradOt = SmemOperand<typename Traits::SmemCopyQt, typename Traits::SmemLayoutGradOt, kRowV,
                             true, kPartM>;
  // Where the part of a column of warps begins, in bytes: in P^T and dS^T,
  CUTE_HOST_DEVICE static constexpr int part_of_p(int column) {
    return column * (Traits::kTileN * kPartM * kBytes);
  }
  // and in Q^T or dO^T with kCols columns.
  template <int kCols>
  CUTE_HOST_DEVICE static constexpr int part_of_t(int column) {
    return column * (kPartM * kSwizzleCols<kCols> * kBytes);
  }
  // The column of warps whose part a warp of column `own` takes as the i-th after its own part.
  CUTE_HOST_DEVICE static constexpr int column_after(int own, int i) {
    return (own + i) % Traits::kWarpsM;
  }
  // dQ = dS K.
  using Pt = Transposed<typename Traits::SmemCopyPt, typename Traits::SmemLayoutPt, kRowP>;
  using Kt = Transposed<typename Traits::SmemCopyKt, typename Traits::SmemLayoutKt, kRow>;

  // The gradients on their way out.
  template <class TiledMma, class SmemLayout, int kElements>
  using Place = SmemAccumulator<TiledMma, SmemLayout, kElements, typename Traits::Element>;
  using PlaceOfGradK = Place<typename Traits::TiledMmaKV, typename Traits::SmemLayoutK, kRow>;
  using PlaceOfGradV = Place<typename Traits::TiledMmaKV, typename Traits::SmemLayoutV, kRowV>;
  using PlaceOfGradQ = Place<typename Traits::TiledMmaQ, typename Traits::SmemLayoutQ, kRow>;
};

// For each operand the first address that this thread would give to ldmatrix if the operand's tile
// began at the start of shared memory; each product adds where the tile really begins. Tiles of
// both head dims have rows of the same length, so K and V share an address, and so do Q and dO.
template <class Traits>
struct BackwardAddresses {
  using Operands = BackwardOperands<Traits>;
  uint32_t k;   // and V
  uint32_t q;   // and dO
  uint32_t qt;  // and dO^T
  uint32_t p;   // P^T and dS^T, as they lie
  uint32_t pt;  // dS, transposed
  uint32_t kt;

  CUTE_DEVICE BackwardAddresses(typename Traits::SharedMemory const& shared, uint32_t thread)
      : k(address<typename Operands::K>(shared, thread)),
        q(address<typename Operands::Q>(shared, thread)),
        qt(address<typename Operands::Qt>(shared, thread)),
        p(address<typename Operands::P>(shared, thread)),
        pt(address<typename Operands::Pt>(shared, thread)),
        kt(address<typename Operands::Kt>(shared, thread)) {}

  // The operands of dV and dK, cut along their K, the queries: the kPartM queries of the warps in
  // column `column` of the grid.
  CUTE_DEVICE auto part_of_p(int column) const {
    return typename Operands::P(p + Operands::part_of_p(column), offsetof(Tiles, p));
  }
  CUTE_DEVICE auto part_of_grad_s(int column) const {
    return typename Operands::P(p + Operands::part_of_p(column), offsetof(Tiles, grad_s));
  }
  CUTE_DEVICE auto part_of_q(int stage, int column) const {
    return typename Operands::Qt(
        qt + stage * sizeof(Tiles::q[0]) + Operands::template part_of_t<Traits::kHeadDim>(column),
        offsetof(Tiles, q));
  }
  CUTE_DEVICE auto part_of_grad_o(int stage, int column) const {
    return typename Operands::GradOt(qt + stage * sizeof(Tiles::grad_o[0]) +
                                         Operands::template part_of_t<Traits::kHeadDimV>(column),
                                     offsetof(Tiles, grad_o));
  }

 private:
  using Tiles = typename Traits::Tiles;

  template <class Operand>
  CUTE_DEVICE static uint32_t address(typename Traits::SharedMemory const& shared,
                                      uint32_t thread) {
    return opaque(
        Operand(reinterpret_cast<typename Traits::Element const*>(&shared), thread).first);
  }
};

// Rounds a part of an accumulator into 16-bit elements. The registers of the part may have gaps
// between them, which convert_into() would not leave out, so a copy without gaps is made first.
template <class Block, class Block16>
CUTE_DEVICE void round_into(Block const& block, Block16&& block16) {
  using namespace cute;
  Tensor compact = make_fragment_like(block);  // (MMA, MMA_N) or a slice of it, like block
  CUTE_STATIC_ASSERT_V(size(block) == size(block16));
  copy(block, compact);
  convert_into(compact, block16);
}

// One K block ((2 cols, 2 rows, 2 col blocks), MMA_M) of an A operand, seen as (ROWS, COLS).
template <class Block>
CUTE_DEVICE auto operand_rows(Block&& block) {
  using namespace cute;
  auto const layout = block.layout();
  return make_tensor(block.data(), make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                                               make_layout(get<0, 0>(layout), get<0, 2>(layout))));
}

// Writes one K block of an A operand to shared memory, into columns 16 k to 16 k + 15 of a tile.
//   block  ((2, 2, 2), MMA_M)       16-bit elements
//   tXsX   ((2, 2), MMA_M, MMA_N)   this thread's part of the tile, as of an accumulator
template <class Block, class Smem>
CUTE_DEVICE void store_operand_block(Block const& block, Smem&& tXsX, int k) {
  using namespace cute;
  Tensor r32 = recast<uint32_t>(block);  // ((1, 2, 2), MMA_M)
  Tensor s32 = recast<uint32_t>(tXsX);   // ((1, 2), MMA_M, MMA_N)
  CUTE_STATIC_ASSERT_V(size<0>(r32) == _4{});
  CUTE_STATIC_ASSERT_V(size<0>(s32) == _2{});
  CUTE_STATIC_ASSERT_V(size<1>(r32) == size<1>(s32));
  CUTE_UNROLL
  for (int m = 0; m < size<1>(r32); ++m) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      s32(make_coord(0, i % 2), m, 2 * k + i / 2) = r32(make_coord(0, i % 2, i / 2), m);
    }
  }
}

}  // namespace cute_attention::sm80
