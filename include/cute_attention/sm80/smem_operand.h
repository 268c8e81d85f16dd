// sm80/smem_operand.h: an operand of an MMA in a swizzled tile of shared memory, as the addresses
// that this thread gives to ldmatrix.
//
// CuTe says where the thread's first 16 bytes lie and how far from there every other block's do.
// The swizzle moves vectors within a row of its atom by an XOR, and a block begins at a multiple of
// what a thread's own position spans there: its address is one XOR from the thread's first, plus a
// constant that the instruction holds. So a product computes at most four addresses, not one for
// each block.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/opaque.h"
#include "cute_attention/sm80/swizzled_layout.h"

namespace cute_attention::sm80 {

// Four 8x8 matrices of 16-bit elements. PTX ISA, "ldmatrix".
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
//   SmemLayout   (M or N, K), swizzled; of K the first kK are the operand
//   kRow         elements in a row of the swizzled atom
template <class TiledCopy, class SmemLayout, int kRow, bool kTransposed,
          int kK = decltype(cute::size<1>(SmemLayout{}))::value>
struct SmemOperand {
  using Element = typename TiledCopy::ValType;
  using Swizzled = SwizzledLayout<SmemLayout>;
  static constexpr uint32_t kElementBytes = sizeof(Element);

  uint32_t first;  // shared-memory address of this thread's vector of block (0, 0), less `base`
  uint32_t base = 0;

  // (THREAD, (8, VECTORS), (CPY_MN, CPY_K)) of the tile before the swizzle.
  using Places = decltype(TiledCopy::tidfrg_S(typename Swizzled::Linear{}));

  CUTE_DEVICE SmemOperand(Element const* tile, uint32_t thread)
      : first(cute::cast_smem_ptr_to_uint(tile) +
              Swizzled::swizzle(Places{}(thread, cute::_0{}, cute::_0{})) * kElementBytes) {}

  // The vector's address apart from `tile_bytes`, where the tile begins: tiles with the same rows
  // share the one, and instructions hold the other, where it is a constant.
  CUTE_DEVICE SmemOperand(uint32_t address, uint32_t tile_bytes)
      : first(address), base(tile_bytes) {}

  // The address of a block of this thread, of which thread 0's lies `offset` bytes from its first.
  CUTE_HOST_DEVICE constexpr uint32_t block_address(uint32_t offset) const {
    uint32_t const in_row = offset % (kRow * kElementBytes);
    return (first ^ in_row) + (base + offset - in_row);
  }

  // Loads K block k of the operand's fragment (MMA, MMA_MN, MMA_K).
  template <class Fragment>
  CUTE_DEVICE void load(Fragment& fragment, int k) const {
    using namespace cute;
    Tensor tXrX = TiledCopy{}.get_slice(_0{}).retile_D(fragment);  // ((8, VECTORS), CPY_MN, CPY_K)
    CUTE_STATIC_ASSERT_V((size<0, 1>(tXrX) == size<1, 1>(Places{})));
    CUTE_STATIC_ASSERT_V((size<1>(tXrX) == size<2, 0>(Places{})));
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

  // The operand as a tensor of its shape (M or N, K), to make fragments of.
  CUTE_DEVICE static auto shape_tensor() {
    using namespace cute;
    return make_tensor(make_smem_ptr(static_cast<Element*>(nullptr)),
                       make_layout(make_shape(size<0>(SmemLayout{}), Int<kK>{})));
  }

  // The same, whose first address is computed once for a whole loop.
  CUTE_DEVICE SmemOperand held() const {
    SmemOperand operand = *this;
    operand.first = pinned(first);
    return operand;
  }

  // The same, whose addresses the compiler computes where they are used, not ahead of a loop.
  CUTE_DEVICE SmemOperand here() const {
    SmemOperand operand = *this;
    operand.first = opaque(first);
    return operand;
  }
};

// Where this thread's part of an accumulator goes in a swizzled tile of shared memory, in pairs of
// 16-bit elements; addresses as above.
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

  // Where the elements of a thread lie before the swizzle, ((2 cols, 2 rows), MMA_M, MMA_N).
  template <class Thread>
  CUTE_HOST_DEVICE static constexpr auto places(Thread const& thread) {
    return TiledMma{}.get_slice(thread).partition_C(
        cute::make_tensor(cute::counting_iterator<int>{}, typename Swizzled::Linear{}));
  }

  CUTE_HOST_DEVICE explicit constexpr SmemAccumulator(uint32_t address) : first(address) {}

  CUTE_DEVICE SmemAccumulator held() const { return SmemAccumulator(pinned(first)); }

  // The address of a pair of this thread, of which thread 0's lies `offset` bytes from its first.
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
