// sm80/grad_bias_traits.h: every layout, copy and MMA of the kernel for the gradient of a bias, for
// one row of the table. This file compiles for the host too.
//
// Tiles are as large as the shared memory holds them, but at head dim 32. There a visit of 64 x 64
// scores copies 24 KB and multiplies for 200 clocks, so it mostly waits: 4 warps compute such a
// tile, and a multiprocessor has three or four CTAs of them. Windows of 49 or 64 tokens are one
// tile, of which a larger one would be half empty.
#pragma once

#include "cute_attention/core/dropout_words.h"
#include "cute_attention/core/grad_bias_tiles.h"
#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/smem_operand.h"

namespace cute_attention::sm80 {

// Whether kernels for small heads serve these head dims.
constexpr int kSmallHeadDim = 32;
constexpr bool has_small_heads(int head_dim, int head_dim_v) {
  return head_dim <= kSmallHeadDim && head_dim_v <= kSmallHeadDim;
}

//   kMaxBytes    the shared memory of the row's backward kernel. It runs on the chip that runs the
//                row, and so does a kernel that takes no more.
//   kSmallHeads  whether they are the kernels for small heads
template <class Row, int kMaxBytes, bool kSmallHeads>
struct GradBiasTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr int kHeadDim = kSmallHeads ? kSmallHeadDim : kKey.head_dim;
  static constexpr int kHeadDimV = kSmallHeads ? kSmallHeadDim : kKey.head_dim_v;
  using Element = ElementOf<kKey.dtype>;
  static constexpr bool kDrops = has_dropout(kKey.score_mods);

  template <int kTileM, int kTileN>
  struct Tiles : DropoutWords<kDrops, kTileM> {
    cute::array_aligned<Element, kTileM * kHeadDim, 128> q;
    cute::array_aligned<Element, kTileN * kHeadDim, 128> k;
    cute::array_aligned<Element, kTileM * kHeadDimV, 128> grad_o;
    cute::array_aligned<Element, kTileN * kHeadDimV, 128> v;
    cute::array_aligned<Element, kTileM * kTileN, 128> bias;
    float lse[kTileM];
    float delta[kTileM];
  };
  template <int kTileM, int kTileN>
  static constexpr bool kFits = int(sizeof(Tiles<kTileM, kTileN>)) <= kMaxBytes;
  static constexpr TileShape kTile = kFits<128, 64> && !kSmallHeads ? TileShape{128, 64}
                                     : kFits<64, 64>                ? TileShape{64, 64}
                                                                    : TileShape{32, 32};
  static constexpr int kTileM = kTile.m;
  static constexpr int kTileN = kTile.n;

  // A warp has 32 or 16 queries, and 32 keys that lie side by side: of a row of the gradient in 16
  // bits, that is two sectors of 32 bytes.
  static constexpr int kWarpsM = kSmallHeads || kTileM == 32 ? 2 : 4;
  static constexpr int kWarpsN = kTileN / 32;
  static constexpr int kThreads = kWarpsM * kWarpsN * 32;
  static constexpr int kStoreThreads = kThreads;
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::MMA_Atom<MmaAtom<Element>>{},
      cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>>{},
      cute::Tile<cute::Int<16 * kWarpsM>,
                 cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::_4>,
                              cute::Stride<cute::_1, cute::_32, cute::_8>>,
                 cute::_16>{}));

  using SmemLayoutQ = SmemTile<kTileM, kHeadDim>;
  using SmemLayoutK = SmemTile<kTileN, kHeadDim>;
  using SmemLayoutGradO = SmemTile<kTileM, kHeadDimV>;
  using SmemLayoutV = SmemTile<kTileN, kHeadDimV>;
  using SmemLayoutBias = SmemTile<kTileM, kTileN>;
  // The sums, in fp32, once the last tile of scores is visited. The padding keeps threads that
  // write rows apart in the banks.
  using SmemLayoutSum = cute::Layout<cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>,
                                     cute::Stride<cute::Int<kTileN + 8>, cute::_1>>;

  using CpAsync = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
  using GmemCopyQK = GmemTiledCopy<CpAsync, Element, kHeadDim, kThreads>;
  using GmemCopyV = GmemTiledCopy<CpAsync, Element, kHeadDimV, kThreads>;
  using SmemCopyA = decltype(cute::make_tiled_copy_A(
      cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMma{}));
  using SmemCopyB = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMma{}));
  static constexpr int kRow = kSwizzleCols<kHeadDim>;
  static constexpr int kRowV = kSwizzleCols<kHeadDimV>;
  using OperandQ = SmemOperand<SmemCopyA, SmemLayoutQ, kRow, false>;
  using OperandK = SmemOperand<SmemCopyB, SmemLayoutK, kRow, false>;
  using OperandGradO = SmemOperand<SmemCopyA, SmemLayoutGradO, kRowV, false>;
  using OperandV = SmemOperand<SmemCopyB, SmemLayoutV, kRowV, false>;

  union SharedMemory {
    Tiles<kTileM, kTileN> tiles;
    cute::array_aligned<float, cute::cosize_v<SmemLayoutSum>, 128> sum;
  };
  static_assert(int(sizeof(SharedMemory)) <= kMaxBytes, "shared memory of a CTA");
  // How many CTAs the registers of a multiprocessor must hold: two, if its shared memory does. With
  // sums in registers beside S and dP, or with every other feature, 128 registers of a thread do
  // not do. CTAs for small heads have half the threads; they get 128 registers, 168 or 255.
  static constexpr bool kTwoFit =
      2 * (int(sizeof(SharedMemory)) + 1024) <= max_shared_memory(kKey.arch) + 1024;
  static constexpr bool kEvery = serves_subsets(kKey.score_mods);
  static constexpr int kCtas = kSmallHeads ? (kEvery ? 3 : 4) : kTwoFit && !kEvery ? 2 : 1;
  static constexpr int kCtasOfSums = kSmallHeads ? (kEvery ? 2 : 3) : 1;
};

}  // namespace cute_attention::sm80
