// sm90/mla_traits.h: every layout and MMA of the sm90 forward kernel for rows with qv, its barriers
// and its shared memory: multi-head latent attention (MLA) in its absorbed form (docs/mla.md).
//
// A score is q.k + qv.v, and V is wide: with 64 and 512 columns a key has 576 numbers for S, of
// which 512 are its values. So V is loaded once, for both products, and O is so wide that two
// warpgroups share its columns.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "cute_attention/element.h"
#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/mla_exchange.h"
#include "cute_attention/sm90/smem_tiles.h"
#include "cute_attention/sm90/warpgroup.h"
#include "cute_attention/study.h"

namespace cute_attention::sm90 {

// The parts of a tile of queries (qv, q) or of keys (v, k) that are loaded and released by
// themselves: the columns of V that a warpgroup multiplies by P, and those of k alone.
enum Part : int { kLeft, kRight, kRope };
constexpr int kParts = 3;

template <class Row>
struct MlaTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  static constexpr int kThreads = kConfig.warps * 32;
  using Element = ElementOf<kKey.dtype>;
  using Study = StudyOf<Row>;
  static_assert(kKey.score_mods == score_mods::Qv, "no modifier of scores");
  // By how much, in base 2, a score may exceed the reference of its row.
  static constexpr int kMostLag = Study::kReference == Reference::Exact ? 0 : 14;

  // One warpgroup loads; of the others each computes half of the columns of O.
  static constexpr int kConsumers = 2;
  static constexpr int kHalf = kHeadDimV / kConsumers;
  static_assert(kTileM == kWarpgroupM, "both have all rows of the tile");
  static constexpr int kCtasOfSm = 1;
  static constexpr bool kStoresBoxes = false;
  using Registers = WarpgroupRegisters<kConsumers>;
  static_assert(kConfig.warps == (kConsumers + 1) * kWarpgroupWarps,
                "a producer warpgroup and two consumers");

  // S = Q K^T, both from shared memory, one part of the columns after the other; a warpgroup's half
  // of O = P V, P from registers.
  using MmaQK = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileN>, cute::Int<kHeadDim>>>()));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kHalf>, cute::Int<kTileN>>,
          cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  // Parts lie one after the other: the columns of a part, and how many columns are before it.
  static constexpr int cols(Part part) { return part == kRope ? kHeadDim : kHalf; }
  static constexpr int col(Part part) { return part * kHalf; }
  static constexpr int kCols = kHeadDimV + kHeadDim;

  static constexpr bool kBiasTiles = false;
  static constexpr bool kBiasBesideK = false;
  static constexpr bool kFloatBias = false;
  static constexpr bool kKeyBias = false;
  static constexpr bool kCountsCausalTiles = false;  // nor any other: kTakesTiles
  // Columns of a box of q and k, of qv and v, and of a part.
  static constexpr int kBox = narrow_box_cols<kHeadDim>(Study::kSwizzle);
  static constexpr int kBoxV = narrow_box_cols<kHalf>(Study::kSwizzle);
  static constexpr int box(Part part) { return part == kRope ? kBox : kBoxV; }

  // A part of Q, a part of K, and the columns of V that a warpgroup multiplies.
  template <Part kPart>
  using SmemLayoutQ = SmemTiles<Element, kTileM, cols(kPart), 1, box(kPart)>;  // (M, COLS, 1)
  template <Part kPart>
  using SmemLayoutK = SmemTiles<Element, kTileN, cols(kPart), 1, box(kPart)>;  // (N, COLS, 1)
  using SmemLayoutVt = SmemTilesTransposed<Element, kTileN, kHalf, 1, kBoxV>;  // (HALF, N, 1)

  struct SharedMemory {
    cute::array_aligned<Element, kTileM * kCols, 1024> q;             // (parts)
    cute::array_aligned<Element, kStages * kTileN * kCols, 1024> kv;  // (parts, STAGE)

    MlaExchange<kTileN> exchange;
    ForwardTile tiles[kTileSlots];

    // Full and empty as in forward_traits.h. Each part is released by the one warpgroup that reads
    // it last.
    uint64_t query_full;                   // 1 arrival
    uint64_t query_empty;                  // kWarpgroupWarps arrivals
    uint64_t part_full[kStages][kParts];   // 1 arrival
    uint64_t part_empty[kStages][kParts];  // kWarpgroupWarps arrivals
    uint64_t tile_full[kTileSlots];        // 1 arrival, of the scheduler warp
    uint64_t tile_empty[kTileSlots];       // all consumer warps and the load warp
    uint64_t landed[2];  // halves of V that the load warp has to mend before they are full: 1
  };

  // Where a part begins in the buffer of Q, and in that of K and V, in elements.
  static constexpr int offset_q(Part part) { return kTileM * col(part); }
  static constexpr int offset_kv(int stage, int part) {
    return kTileN * (stage * kCols + part * kHalf);
  }

  static_assert(kTileN % 16 == 0 && kTileN <= 256, "MMA and TMA box sizes");
  static_assert(kHeadDim % 64 == 0 && kHalf % 64 == 0 && kHalf <= 256,
                "swizzle block and MMA sizes");
  static_assert(
      decltype(cute::size<1>(typename MmaQK::AtomShape_MNK{}))::value == kTileN &&
          decltype(cute::size<1>(typename MmaPV::AtomShape_MNK{}))::value == kHalf,
      "N of a WGMMA: define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED, as kernels.cmake does");
  static_assert(sizeof(SharedMemory) <= max_shared_memory(kKey.arch), "shared memory of a CTA");
};

}  // namespace cute_attention::sm90
