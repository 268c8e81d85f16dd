// sm80/backward_traits.h: every layout, copy and MMA of the sm80 backward kernel, for one row of
// the table.
//
// Scores are computed transposed, S^T = K Q^T: then P^T and dS^T come out of the accumulators as
// the A operands of dV += P^T dO and dK += dS^T Q. Warps form a grid of kWarpsN x kWarpsM:
//
//   S^T, dP^T (N, M)   a warp has 32 or 16 keys and kPartM queries
//   dV, dK    (N, D)   a warp has the same keys and D / kWarpsM columns. It multiplies its own part
//                      of P^T and dS^T from registers, and the parts of the other warps with these
//                      keys from shared memory
//   dQ        (M, D)   the warps form another grid, and read dS from shared memory
#pragma once

#include "cute_attention/core/dropout_words.h"
#include "cute_attention/sm80/forward_traits.h"

namespace cute_attention::sm80 {

// 8 rows of kCols elements, where kCols is 16, 32 or 64, swizzled so that the vectors of one column
// in the 8 rows lie in 8 different groups of 4 banks. With kSwizzle below 128 bytes vectors change
// places within so many bytes of a row, as in SwizzledAtom.
template <int kCols, int kSwizzle>
constexpr int kNarrowBits =
    (kSwizzle >= 32) + (kSwizzle >= 64 && kCols >= 32) + (kSwizzle >= 128 && kCols == 64);
template <int kCols, int kSwizzle>
using NarrowAtom =
    decltype(cute::composition(cute::Swizzle<kNarrowBits<kCols, kSwizzle>, 3, 3>{},
                               cute::Layout<cute::Shape<cute::_8, cute::Int<kCols>>,
                                            cute::Stride<cute::Int<kCols>, cute::_1>>{}));

// Whether a grid of warps with `keys` keys each divides the tile: the warps fill the grid, and the
// queries and columns of a warp are whole MMAs.
constexpr bool divides_tile(KernelConfig const& config, KernelKey const& key, int keys) {
  int const warps_n = config.tile_n / keys;
  int const side = 16 * (config.warps / warps_n);
  return config.warps % warps_n == 0 && config.tile_m % side == 0 && key.head_dim % side == 0 &&
         key.head_dim_v % side == 0;
}

template <class Row>
struct BackwardTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr bool kPaddedNumbers = false;  // of queries (core/grad_tile.h)
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kThreads = kConfig.warps * 32;
  // Of dQ (core/backward_prepare.h); all add to them.
  static constexpr bool kHasSums = true;
  static constexpr bool kLeavesKey = false;
  CUTE_DEVICE static void start_states(int32_t*, int64_t, int, bool) {}
  using Element = ElementOf<kKey.dtype>;
  using Study = StudyOf<Row>;

  // A warp has 32 keys where such a grid divides the tile, else 16. With 32 keys each fragment of
  // Q, dO, Q^T or dO^T that the warp loads serves two MMAs, one for each 16 keys.
  static constexpr int kWarpsN = divides_tile(kConfig, kKey, 32) ? kTileN / 32 : kTileN / 16;
  static constexpr int kWarpsM = kConfig.warps / kWarpsN;
  static constexpr int kPartM = kTileM / kWarpsM;
  // The grid of warps for dQ. A warp has 32 queries where that divides the tile, else 16: the
  // nearer its part of dQ is to a square, the less the warp loads.
  static constexpr int kGradQWarpsM =
      kTileM / (kTileM >= 32 && kHeadDim % (16 * (kConfig.warps / (kTileM / 32))) == 0 ? 32 : 16);
  static constexpr int kGradQWarpsD = kConfig.warps / kGradQWarpsM;

  template <int kWarpsRows, int kWarpsCols, class TileCols>
  using Mma = decltype(cute::make_tiled_mma(
      cute::MMA_Atom<MmaAtom<Element>>{},
      cute::Layout<cute::Shape<cute::Int<kWarpsRows>, cute::Int<kWarpsCols>, cute::_1>>{},
      cute::Tile<cute::Int<16 * kWarpsRows>, TileCols, cute::_16>{}));

  // The permutation gives a warp kPartM adjacent queries: P^T and dS^T then are K blocks of the A
  // operand of dV and dK as they lie in the warp's registers.
  using TiledMmaS =
      Mma<kWarpsN, kWarpsM,
          cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsM>, cute::Int<kPartM / 8>>,
                       cute::Stride<cute::_1, cute::Int<kPartM>, cute::_8>>>;
  using TiledMmaKV = Mma<kWarpsN, kWarpsM, cute::Int<16 * kWarpsM>>;
  using TiledMmaQ = Mma<kGradQWarpsM, kGradQWarpsD, cute::Int<16 * kGradQWarpsD>>;

  using SmemLayoutQ = SmemTile<kTileM, kHeadDim, Study::kSwizzle>;
  using SmemLayoutQt = SmemTileTransposed<kTileM, kHeadDim, Study::kSwizzle>;
  using SmemLayoutK = SmemTile<kTileN, kHeadDim, Study::kSwizzle>;
  using SmemLayoutKt = SmemTileTransposed<kTileN, kHeadDim, Study::kSwizzle>;
  using SmemLayoutV = SmemTile<kTileN, kHeadDimV, Study::kSwizzle>;
  using SmemLayoutGradO = SmemTile<kTileM, kHeadDimV, Study::kSwizzle>;
  using SmemLayoutGradOt = SmemTileTransposed<kTileM, kHeadDimV, Study::kSwizzle>;
  // P^T and dS^T (N, M). The part of each column of warps, kPartM queries, lies together in memory.
  static constexpr int kRowP = kPartM < 64 ? kPartM : 64;
  using SmemLayoutP = decltype(cute::tile_to_shape(
      NarrowAtom<kRowP, Study::kSwizzle>{}, cute::Shape<cute::Int<kTileN>, cute::Int<kTileM>>{}));
  using SmemLayoutPt = decltype(cute::composition(
      SmemLayoutP{}, cute::Layout<cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>,
                                  cute::Stride<cute::Int<kTileN>, cute::_1>>{}));
  // One number for each query, as a tile (N, M): all keys see the same number.
  using SmemLayoutRow = cute::Layout<cute::Shape<cute::Int<kTileN>, cute::Int<kTileM>>,
                                     cute::Stride<cute::_0, cute::_1>>;

  using CopyVector = LoadVector<Study::kCopies>;
  using GmemCopyQK = GmemTiledCopy<CopyVector, Element, kHeadDim, kThreads>;
  using GmemCopyV = GmemTiledCopy<CopyVector, Element, kHeadDimV, kThreads>;
  using GmemStoreQK =
      GmemTiledCopy<cute::UniversalCopy<cute::uint128_t>, Element, kHeadDim, kThreads>;
  using GmemStoreV =
      GmemTiledCopy<cute::UniversalCopy<cute::uint128_t>, Element, kHeadDimV, kThreads>;

  // ldmatrix loads four 8x8 matrices with one instruction. It transposes them where the K of the
  // product does not run along the rows of the tile.
  using Ldmatrix = cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>;
  using LdmatrixT = cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>;
  using SmemCopyK = decltype(cute::make_tiled_copy_A(Ldmatrix{}, TiledMmaS{}));     // and V
  using SmemCopyQ = decltype(cute::make_tiled_copy_B(Ldmatrix{}, TiledMmaS{}));     // and dO
  using SmemCopyP = decltype(cute::make_tiled_copy_A(Ldmatrix{}, TiledMmaKV{}));    // and dS
  using SmemCopyQt = decltype(cute::make_tiled_copy_B(LdmatrixT{}, TiledMmaKV{}));  // and dO^T
  using SmemCopyPt = decltype(cute::make_tiled_copy_A(LdmatrixT{}, TiledMmaQ{}));   // dS
  using SmemCopyKt = decltype(cute::make_tiled_copy_B(LdmatrixT{}, TiledMmaQ{}));

  // At the end dK takes the place of K, and dV that of V.
  struct Tiles {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutK>, 128> k;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutV>, 128> v;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutQ>, 128> q[kStages];
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutGradO>, 128> grad_o[kStages];
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutP>, 128> grad_s;
    // With one column of warps each warp has all of its P in registers, and nothing is stored here.
    cute::array_aligned<Element, kWarpsM == 1 ? 8 : cute::cosize_v<SmemLayoutP>, 128> p;
    float lse[kStages][kTileM];
    float delta[kStages][kTileM];
  };
  // With a map and a bias, the bias is read while P is written (backward_bias.h).
  static constexpr uint32_t kMapAndBias = score_mods::Softcap | score_mods::Bias;
  static constexpr bool kHasBiasBuffer = (kKey.score_mods & kMapAndBias) == kMapAndBias;
  struct SharedMemory : Tiles,
                        DropoutStages<has_dropout(kKey.score_mods), kTileM, kStages>,
                        BiasBuffer<kHasBiasBuffer, Element, kTileM * kTileN> {};
  static constexpr int kSmemBytesGradQ = int(sizeof(Element)) * kTileM * kHeadDim;

  static_assert(kTileN % 32 == 0 && divides_tile(kConfig, kKey, kTileN / kWarpsN),
                "a warp owns whole MMA tiles of S^T, dK and dV");
  static_assert(kTileM % (16 * kGradQWarpsM) == 0 && kHeadDim % (16 * kGradQWarpsD) == 0,
                "a warp owns whole MMA tiles of dQ");
  static_assert(kSwizzleCols<kHeadDim> == kSwizzleCols<kHeadDimV>, "K and V share addresses");
  static_assert(kThreads >= 2 * kTileM, "each thread copies one LSE or delta");
  static_assert(kStages == 1 || kStages == 2, "buffers of Q and dO");
  static_assert(!kHasBiasBuffer || kStages == 1, "the bias of a step is there when Q is");
  static_assert(sizeof(SharedMemory) <= max_shared_memory(kKey.arch), "shared memory of a CTA");
  CUTE_STATIC_ASSERT_V(cute::size(TiledMmaS{}) == cute::Int<kThreads>{}, "threads of S^T, dP^T");
  CUTE_STATIC_ASSERT_V(cute::size(TiledMmaKV{}) == cute::Int<kThreads>{}, "threads of dK, dV");
  CUTE_STATIC_ASSERT_V(cute::size(TiledMmaQ{}) == cute::Int<kThreads>{}, "threads of dQ");
  CUTE_STATIC_ASSERT_V(cute::size(GmemCopyQK{}) == cute::Int<kThreads>{}, "threads of the copy");
  CUTE_STATIC_ASSERT_V(cute::size(GmemCopyV{}) == cute::Int<kThreads>{}, "threads of the copy");
};

}  // namespace cute_attention::sm80
