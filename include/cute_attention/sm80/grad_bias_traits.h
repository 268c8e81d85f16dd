// sm80/grad_bias_traits.h: every layout, copy and MMA of the kernel for the gradient of a bias, for
// one row of the table. This file compiles for the host too.
#pragma once

#include "cute_attention/core/dropout_words.h"
#include "cute_attention/core/grad_bias_tiles.h"
#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/smem_operand.h"

namespace cute_attention::sm80 {

//   kMaxBytes  the shared memory of the row's backward kernel. It runs on the chip that runs the
//              row, and so does a kernel that takes no more.
template <class Row, int kMaxBytes>
struct GradBiasTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
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
  static constexpr int kTileN = 64;
  static constexpr int kTileM = int(sizeof(Tiles<128, kTileN>)) <= kMaxBytes ? 128 : 64;
  static constexpr TileShape kTile = {kTileM, kTileN};

  // A warp has kTileM / 4 queries, and 32 keys that lie side by side: of a row of the gradient in
  // 16 bits, that is two sectors of 32 bytes.
  static constexpr int kWarpsM = 4;
  static constexpr int kWarpsN = 2;
  static constexpr int kThreads = kWarpsM * kWarpsN * 32;
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
  // not do.
  static constexpr bool kRoomForTwo =
      2 * (int(sizeof(SharedMemory)) + 1024) <= max_shared_memory(kKey.arch) + 1024;
  static constexpr int kCtas = kRoomForTwo && !serves_subsets(kKey.score_mods) ? 2 : 1;
  static constexpr int kCtasOfSums = 1;
};

}  // namespace cute_attention::sm80
