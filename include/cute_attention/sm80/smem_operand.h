// sm80/smem_operand.h: an operand of an MMA that lies in a swizzled tile of shared memory: which
// addresses this thread gives to ldmatrix.
//
// CuTe computes where the thread's first 16 bytes lie before the swizzle, and how far from them
// those of every other block lie. The swizzle is an XOR that moves 16-byte vectors within a row of
// its atom. The distances to other blocks have no bits in common with the thread's own position in
// that row. So the address of a block is the thread's first address, XORed with the distance within
// the row, plus the rest of the distance, a constant that the instruction holds. A product computes
// at most four addresses by XOR, instead of one for each block.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/opaque.h"
#include "cute_attention/sm80/swizzled_layout.h"

namespace cute_attention::sm80 {

// Loads four 8x8 matrices of 16-bit elements. PTX ISA, "ldmatrix".
template <bool kTransposed>
CUTE_DEVICE void ldmatrix(uint32_t address, uint32_t& r0, uint32_t& r1, uint32_t& r2,
                          uint32_t& r3) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                 : "r"(address));
  }
}

//   TiledCopy    ldmatrix, tiled as operand A or B of an MMA
//   SmemLayout   (M or N, K), swizzled; the operand is the first kK of K
//   kRow         elements in a row of the swizzled atom
template <class TiledCopy, class SmemLayout, int kRow, bool kTransposed,
          int kK = decltype(cute::size<1>(SmemLayout{}))::value>
struct SmemOperand {
  using Element = typename TiledCopy::ValType;
  using Swizzled = SwizzledLayout<SmemLayout>;
  static constexpr uint32_t kElementBytes = sizeof(Element);

  uint32_t first;     // shared-memory address of this thread's vector of block (0, 0), less `base`
  uint32_t base = 0;  // added to every address

  // Offsets in the tile before the swizzle: (THREAD, (8, VECTORS), (CPY_MN, CPY_K)).
  using Places = decltype(TiledCopy::tidfrg_S(typename Swizzled::Linear{}));

  CUTE_DEVICE SmemOperand(Element const* tile, uint32_t thread)
      : first(cute::cast_smem_ptr_to_uint(tile) +
              Swizzled::swizzle(Places{}(thread, cute::_0{}, cute::_0{})) * kElementBytes) {}

  // The vector lies at address + tile_bytes, where `tile_bytes` is where the tile begins. Tiles
  // whose rows have the same length can share one `address`; where tile_bytes is a constant, the
  // instructions hold it.
  CUTE_DEVICE SmemOperand(uint32_t address, uint32_t tile_bytes)
      : first(address), base(tile_bytes) {}

  // The address of this thread's part of a block. For thread 0 the block lies `offset` bytes after
  // its first block.
  CUTE_HOST_DEVICE constexpr uint32_t block_address(uint32_t offset) const {
    uint32_t const in_row = offset % (kRow * kElementBytes);
    return (first ^ in_row) + (base + offset - in_row);
  }

  // Loads K block k of the operand into its place in the fragment (MMA, MMA_MN, MMA_K).
  template <class Fragment>
  CUTE_DEVICE void load(Fragment& fragment, int k) const {
    using namespace cute;
    Tensor tXrX = TiledCopy{}.get_slice(_0{}).retile_D(fragment);  // ((8, VECTORS), CPY_MN, CPY_K)
    CUTE_STATIC_ASSERT_V((size<0, 1>(tXrX) == size<1, 1>(Places{})));
    CUTE_STATIC_ASSERT_V((size<1>(tXrX) == size<2, 0>(Places{})));
    CUTE_STATIC_ASSERT_V(size<2>(fragment) * _16{} == Int<kK>{});
    CUTE_UNROLL
    for (int block = 0; block < size<1>(tXrX); ++block) {
      CUTE_UNROLL
      for (int v = 0; v < size<0, 1>(tXrX); ++v) {
        uint32_t const offset =
            Swizzled::swizzle(Places{}(_0{}, make_coord(_0{}, v), make_coord(block, k))) *
            kElementBytes;
        Tensor r = recast<uint32_t>(tXrX(make_coord(_, v), block, k));  // (4)
        CUTE_STATIC_ASSERT_V(size(r) == _4{});
        ldmatrix<kTransposed>(block_address(offset), r(0), r(1), r(2), r(3));
      }
    }
  }

  // A tensor with the operand's shape (M or N, K) and no memory, from which an MMA makes fragments.
  CUTE_DEVICE static auto shape_tensor() {
    using namespace cute;
    return make_tensor(make_smem_ptr(static_cast<Element*>(nullptr)),
                       make_layout(make_shape(size<0>(SmemLayout{}), Int<kK>{})));
  }

  // The same operand. The compiler computes its first address once and holds it for a whole loop.
  CUTE_DEVICE SmemOperand held() const {
    SmemOperand operand = *this;
    operand.first = pinned(first);
    return operand;
  }

  // The same operand. The compiler computes its addresses where they are used, not ahead of a loop.
  CUTE_DEVICE SmemOperand here() const {
    SmemOperand operand = *this;
    operand.first = opaque(first);
    return operand;
  }
};

// The places in a swizzled tile of shared memory to which this thread writes its part of an
// accumulator, in pairs of 16-bit elements. Addresses are computed as for SmemOperand.
//
//   SmemLayout   (M, N), swizzled
//   kRow         elements in a row of the swizzled atom
template <class TiledMma, class SmemLayout, int kRow, class Element>
struct SmemAccumulator {
  using Swizzled = SwizzledLayout<SmemLayout>;
  static constexpr uint32_t kElementBytes = sizeof(Element);

  uint32_t first;  // shared-memory address of this thread's first pair

  CUTE_DEVICE SmemAccumulator(Element const* tile, uint32_t thread)
      : first(cute::cast_smem_ptr_to_uint(tile) +
              Swizzled::swizzle(places(thread)(0)) * kElementBytes) {}

  // Offsets of a thread's elements before the swizzle: ((2 cols, 2 rows), MMA_M, MMA_N).
  template <class Thread>
  CUTE_HOST_DEVICE static constexpr auto places(Thread const& thread) {
    return TiledMma{}.get_slice(thread).partition_C(
        cute::make_tensor(cute::counting_iterator<int>{}, typename Swizzled::Linear{}));
  }

  CUTE_HOST_DEVICE explicit constexpr SmemAccumulator(uint32_t address) : first(address) {}

  CUTE_DEVICE SmemAccumulator held() const { return SmemAccumulator(pinned(first)); }

  // The address of a pair of this thread. For thread 0 the pair lies `offset` bytes after its first
  // pair.
  CUTE_HOST_DEVICE constexpr uint32_t block_address(uint32_t offset) const {
    uint32_t const in_row = offset % (kRow * kElementBytes);
    return (first ^ in_row) + (offset - in_row);
  }

  // Writes a fragment of Element, (MMA, MMA_M, MMA_N).
  template <class Fragment>
  CUTE_DEVICE void store(Fragment const& fragment) const {
    using namespace cute;
    auto const pairs = places(_0{});          // ((2 cols, 2 rows), MMA_M, MMA_N)
    Tensor r32 = recast<uint32_t>(fragment);  // ((1, 2 rows), MMA_M, MMA_N)
    CUTE_STATIC_ASSERT_V((size<0, 1>(r32) == size<0, 1>(pairs)));
    CUTE_STATIC_ASSERT_V(size<1>(r32) == size<1>(pairs));
    CUTE_STATIC_ASSERT_V(size<2>(r32) == size<2>(pairs));
    CUTE_UNROLL
    for (int n = 0; n < size<2>(r32); ++n) {
      CUTE_UNROLL
      for (int m = 0; m < size<1>(r32); ++m) {
        CUTE_UNROLL
        for (int row = 0; row < size<0, 1>(r32); ++row) {
          uint32_t const offset =
              Swizzled::swizzle(pairs(make_coord(_0{}, row), m, n)) * kElementBytes;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(block_address(offset)),
                       "r"(r32(make_coord(_0{}, row), m, n))
                       : "memory");
        }
      }
    }
  }
};

}  // namespace cute_attention::sm80
