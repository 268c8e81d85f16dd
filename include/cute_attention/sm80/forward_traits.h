// sm80/forward_traits.h: every layout, copy and MMA of the sm80 forward kernel, for one row of the
// table.
//
// The warps form a grid of kWarpsM x kWarpsN. Each warp has 32 queries, so that each fragment of K
// or V that it loads serves two MMAs:
//
//   S (M, N)    the kWarpsN warps with the same queries divide the keys of a tile among themselves
//   O (M, DV)   the same warps divide the columns of O; a warp needs P of all keys for its columns,
//               so where kWarpsN > 1, P goes through shared memory
//
// To change how the kernel moves data or multiplies, change this file (or the row's tile in
// src/kernels/forward.def); the kernel follows. This file compiles for the host too.
#pragma once

#include <cute/tensor.hpp>  // before the atoms: they need it, and g++ does not forgive the order

#include <cute/atom/copy_atom.hpp>
#include <cute/atom/mma_atom.hpp>

#include "cute_attention/core/resident_warps.h"
#include "cute_attention/element.h"
#include "cute_attention/sm80/bias_tile.h"
#include "cute_attention/sm80/row_exchange.h"
#include "cute_attention/study.h"

namespace cute_attention::sm80 {

// The MMA of all sm80 kernels: 16x8x16, fp32 accumulators, both operands K-major.
template <class Element>
using MmaAtom =
    std::conditional_t<std::is_same_v<Element, cutlass::half_t>, cute::SM80_16x8x16_F32F16F16F32_TN,
                       cute::SM80_16x8x16_F32BF16BF16F32_TN>;

// The MMA of a grid of kWarpsM x kWarpsN warps, in which each loads its operands by ldmatrix.x4.
template <class Element, int kWarpsM, int kWarpsN>
using MmaOfWarps = decltype(cute::make_tiled_mma(
    cute::MMA_Atom<MmaAtom<Element>>{},
    cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>>{},
    cute::Tile<cute::Int<16 * kWarpsM>, cute::Int<16 * kWarpsN>, cute::_16>{}));

// The same where several warps have the same rows, and each has blocks of 16 adjacent columns.
template <class Element, int kWarpsM, int kWarpsN>
using MmaOfWarpsInBlocks = decltype(cute::make_tiled_mma(
    cute::MMA_Atom<MmaAtom<Element>>{},
    cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>>{},
    cute::Tile<cute::Int<16 * kWarpsM>,
               cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::_2>,
                            cute::Stride<cute::_1, cute::_16, cute::_8>>,
               cute::_16>{}));

// One 16-byte vector of 16-bit elements: the unit of cp.async, of ldmatrix rows and of every
// swizzle here.
constexpr int kVector = 8;

// Columns of a swizzled block: 64 elements (128 bytes, all 32 banks) where 64 divides the number of
// columns, else 32.
template <int kCols>
constexpr int kSwizzleCols = kCols % 64 == 0 ? 64 : 32;

// 8 rows x kSwizzleCols, row-major. The swizzle moves 16-byte vector v of row r to vector v ^ r, so
// that the 8 rows that ldmatrix reads at a time lie in 8 different groups of 4 banks. With 32
// columns two rows share 128 bytes, and the XOR takes r / 2. With kSwizzle below 128 bytes it only
// takes the lowest bits of r that keep a vector within so many bytes, and groups of banks have
// several of the rows.
template <int kCols, int kSwizzle>
constexpr int kSwizzleBits =
    (kSwizzle >= 32) + (kSwizzle >= 64) + (kSwizzle >= 128 && kSwizzleCols<kCols> == 64);
template <int kCols, int kSwizzle>
using SwizzledAtom = decltype(cute::composition(
    cute::Swizzle<kSwizzleBits<kCols, kSwizzle>, 3, 3>{},
    cute::Layout<cute::Shape<cute::_8, cute::Int<kSwizzleCols<kCols>>>,
                 cute::Stride<cute::Int<kSwizzleCols<kCols>>, cute::_1>>{}));

// A row-major tile of kRows x kCols in shared memory.
template <int kRows, int kCols, int kSwizzle = TableChoices::kSwizzle>
using SmemTile = decltype(cute::tile_to_shape(SwizzledAtom<kCols, kSwizzle>{},
                                              cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));

// The same memory read as its transpose, (kCols, kRows).
template <int kRows, int kCols, int kSwizzle = TableChoices::kSwizzle>
using SmemTileTransposed =
    decltype(cute::composition(SmemTile<kRows, kCols, kSwizzle>{},
                               cute::Layout<cute::Shape<cute::Int<kCols>, cute::Int<kRows>>,
                                            cute::Stride<cute::Int<kRows>, cute::_1>>{}));

// Copies between global and shared memory. Each thread copies one 16-byte vector, and neighbouring
// threads copy neighbouring vectors of a row, so that kSwizzleCols columns of a row are read in
// whole 32-byte sectors.
template <class CopyOperation, class Element, int kCols, int kThreads>
using GmemTiledCopy = decltype(cute::make_tiled_copy(
    cute::Copy_Atom<CopyOperation, Element>{},
    cute::Layout<cute::Shape<cute::Int<kThreads / (kSwizzleCols<kCols> / kVector)>,
                             cute::Int<kSwizzleCols<kCols> / kVector>>,
                 cute::Stride<cute::Int<kSwizzleCols<kCols> / kVector>, cute::_1>>{},
    cute::Layout<cute::Shape<cute::_1, cute::Int<kVector>>>{}));

// How a kernel copies one 16-byte vector from global to shared memory. cp.async writes zeros
// instead of a vector that lies outside the tensor, so that no MMA reads garbage; so do copies
// through registers (copy.h).
template <Copies kCopies>
using LoadVector = std::conditional_t<kCopies == Copies::Async,
                                      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>,
                                      cute::UniversalCopy<cute::uint128_t>>;

template <class Row>
struct ForwardTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  static constexpr int kStages = kConfig.stages;  // buffers of K, and of V
  static constexpr int kThreads = kConfig.warps * 32;
  using Element = ElementOf<kKey.dtype>;
  using Study = StudyOf<Row>;

  static constexpr int kWarpsM = kConfig.warps < kTileM / 32 ? kConfig.warps : kTileM / 32;
  static constexpr int kWarpsN = kConfig.warps / kWarpsM;
  // With dropout a thread needs both keys of a class, which lie 8 apart (core/kept_block.h).
  using TiledMma = std::conditional_t<kWarpsN == 1 || !has_dropout(kKey.score_mods),
                                      MmaOfWarps<Element, kWarpsM, kWarpsN>,
                                      MmaOfWarpsInBlocks<Element, kWarpsM, kWarpsN>>;

  // Whether several warps have the same queries, and divide the keys of a tile and the columns of O
  // among themselves.
  static constexpr bool kSharesKeys = kWarpsN > 1;
  static constexpr bool kPInSharedMemory = kSharesKeys || Study::kPathOfP == PathOfP::Shared;
  // By how much, in base 2, a score may exceed the reference of its row. Warps that share keys
  // exchange the exact maxima.
  static constexpr int kMostLag = kSharesKeys || Study::kReference == Reference::Exact ? 0 : 14;

  using SmemLayoutQ = SmemTile<kTileM, kHeadDim, Study::kSwizzle>;
  using SmemLayoutK = SmemTile<kTileN, kHeadDim, Study::kSwizzle>;
  using SmemLayoutV = SmemTile<kTileN, kHeadDimV, Study::kSwizzle>;
  using SmemLayoutVt = SmemTileTransposed<kTileN, kHeadDimV, Study::kSwizzle>;
  using SmemLayoutO = SmemTile<kTileM, kHeadDimV, Study::kSwizzle>;
  using SmemLayoutP = SmemTile<kTileM, kTileN, Study::kSwizzle>;

  using Bias = BiasTile<Element, SmemTile<kTileM, kTileN>, kSwizzleCols<kTileN>>;

  static constexpr uint32_t kBytesK = cute::cosize_v<SmemLayoutK> * sizeof(Element);  // of a stage
  static constexpr uint32_t kBytesV = cute::cosize_v<SmemLayoutV> * sizeof(Element);  // of a stage

  using CopyVector = LoadVector<Study::kCopies>;
  using GmemCopyQK = GmemTiledCopy<CopyVector, Element, kHeadDim, kThreads>;
  using GmemCopyV = GmemTiledCopy<CopyVector, Element, kHeadDimV, kThreads>;
  using GmemCopyO =
      GmemTiledCopy<cute::UniversalCopy<cute::uint128_t>, Element, kHeadDimV, kThreads>;

  // ldmatrix loads four 8x8 matrices with one instruction. It transposes V on the way, because the
  // MMA of O needs adjacent keys in one register, and V has adjacent columns there.
  using SmemCopyQ = decltype(cute::make_tiled_copy_A(
      cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMma{}));
  using SmemCopyK = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMma{}));
  using SmemCopyP = SmemCopyQ;
  using SmemCopyV = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>{}, TiledMma{}));

  // O takes the place of Q once the last S is computed.
  struct Tiles {
    union {
      cute::array_aligned<Element, cute::cosize_v<SmemLayoutQ>, 128> q;
      cute::array_aligned<Element, cute::cosize_v<SmemLayoutO>, 128> o;
    };
    cute::array_aligned<Element, kStages * cute::cosize_v<SmemLayoutK>, 128> k;
    cute::array_aligned<Element, kStages * cute::cosize_v<SmemLayoutV>, 128> v;
  };
  struct TileOfP {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutP>, 128> p;
  };
  // What the warps with the same queries exchange.
  struct Exchange : TileOfP {
    RowExchange<kTileM, kWarpsM, kWarpsN> rows;
  };
  struct Nothing {};
  static constexpr bool kHasBias = (kKey.score_mods & score_mods::Bias) != 0;
  // A tile of the bias has one buffer, which the next one may overwrite when K has been read.
  static_assert(!kHasBias || kStages == 1, "one buffer of the bias");
  struct SharedMemory : Tiles,
                        std::conditional_t<kSharesKeys, Exchange,
                                           std::conditional_t<kPInSharedMemory, TileOfP, Nothing>>,
                        BiasBuffer<kHasBias, Element, kTileM * kTileN> {};

  // How many CTAs the registers of a multiprocessor must hold.
  static constexpr int kCtas =
      resident_warps(kKey, kConfig, int(sizeof(SharedMemory))) / kConfig.warps;
  // The same where keys lie in pages, whose addresses take more registers.
  static constexpr int kCtasOfPages = 8 / kConfig.warps;

  static_assert(kTileM % (16 * kWarpsM) == 0 && kConfig.warps % kWarpsM == 0 &&
                    kTileN % (16 * kWarpsN) == 0 && kHeadDimV % (16 * kWarpsN) == 0,
                "each warp owns whole MMA tiles of S and O");
  static_assert(kTileN % 16 == 0 && kHeadDim % 32 == 0 && kHeadDimV % 32 == 0,
                "MMA and swizzle block sizes");
  static_assert(kStages == 1 || (kStages == 2 && Study::kLoads == Loads::Eager),
                "K and V have one buffer each, or two where loads are eager");
  static_assert(sizeof(SharedMemory) <= max_shared_memory(kKey.arch), "shared memory of a CTA");
  CUTE_STATIC_ASSERT_V(cute::size(TiledMma{}) == cute::Int<kThreads>{}, "threads of the MMA");
  CUTE_STATIC_ASSERT_V(cute::size(GmemCopyQK{}) == cute::Int<kThreads>{}, "threads of the copy");
  CUTE_STATIC_ASSERT_V(cute::size(GmemCopyV{}) == cute::Int<kThreads>{}, "threads of the copy");
  CUTE_STATIC_ASSERT_V(cute::size(SmemLayoutV{}) == cute::size(SmemLayoutVt{}), "the same memory");
};

}  // namespace cute_attention::sm80
