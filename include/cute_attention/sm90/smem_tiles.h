// sm90/smem_tiles.h: how a tile of 16-bit elements lies in shared memory, where TMA writes it and
// WGMMA reads it.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "cute_attention/sm90/tma_boxes.h"

namespace cute_attention::sm90 {

// 8 rows of kBox columns, row-major and swizzled, as WGMMA reads them (PTX ISA, "Asynchronous
// Warpgroup Level Matrix Shared Memory Layout"): as they are, or as their transpose.
template <class Element, int kBox>
using SwizzledAtom =
    std::conditional_t<kBox == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                       std::conditional_t<kBox == 32, cute::GMMA::Layout_K_SW64_Atom<Element>,
                                          cute::GMMA::Layout_K_SW32_Atom<Element>>>;
template <class Element, int kBox>
using SwizzledAtomTransposed =
    std::conditional_t<kBox == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                       std::conditional_t<kBox == 32, cute::GMMA::Layout_MN_SW64_Atom<Element>,
                                          cute::GMMA::Layout_MN_SW32_Atom<Element>>>;

// kStages tiles of kRows x kCols: a block of kBox columns, all its rows, then the next: what a TMA
// box fills.
template <class Element, int kRows, int kCols, int kStages, int kBox = kBoxCols<kCols>>
using SmemTiles = decltype(cute::tile_to_shape(
    SwizzledAtom<Element, kBox>{},
    cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::Int<kStages>>{}));

// The same memory read as transposes, (kCols, kRows, kStages).
template <class Element, int kRows, int kCols, int kStages, int kBox = kBoxCols<kCols>>
using SmemTilesTransposed = decltype(cute::tile_to_shape(
    SwizzledAtomTransposed<Element, kBox>{},
    cute::Shape<cute::Int<kCols>, cute::Int<kRows>, cute::Int<kStages>>{},
    cute::Step<cute::_2, cute::_1, cute::_3>{}));

// A buffer of shared memory as a tensor.
template <class Layout, class Buffer>
CUTE_DEVICE auto in_shared(Buffer& buffer) {
  return cute::make_tensor(cute::make_smem_ptr(buffer.data()), Layout{});
}

}  // namespace cute_attention::sm90
