// sm90/smem_tiles.h: how a tile of 16-bit elements lies in shared memory, where TMA writes it and
// WGMMA reads it.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "cute_attention/sm90/tma_boxes.h"

namespace cute_attention::sm90 {

// 8 rows of kBoxCols, row-major and swizzled, as WGMMA reads them (PTX ISA, "Asynchronous Warpgroup
// Level Matrix Shared Memory Layout"): as they are, or as their transpose.
template <class Element, int kCols>
using SwizzledAtom =
    std::conditional_t<kBoxCols<kCols> == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                       cute::GMMA::Layout_K_SW64_Atom<Element>>;
template <class Element, int kCols>
using SwizzledAtomTransposed =
    std::conditional_t<kBoxCols<kCols> == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                       cute::GMMA::Layout_MN_SW64_Atom<Element>>;

// kStages tiles of kRows x kCols: a block column of kBoxCols, all its rows, then the next: what a
// TMA box fills.
template <class Element, int kRows, int kCols, int kStages>
using SmemTiles = decltype(cute::tile_to_shape(
    SwizzledAtom<Element, kCols>{},
    cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::Int<kStages>>{}));

// The same memory read as transposes, (kCols, kRows, kStages).
template <class Element, int kRows, int kCols, int kStages>
using SmemTilesTransposed = decltype(cute::tile_to_shape(
    SwizzledAtomTransposed<Element, kCols>{},
    cute::Shape<cute::Int<kCols>, cute::Int<kRows>, cute::Int<kStages>>{},
    cute::Step<cute::_2, cute::_1, cute::_3>{}));

}  // namespace cute_attention::sm90
