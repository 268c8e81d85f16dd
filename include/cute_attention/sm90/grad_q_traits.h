// sm90/grad_q_traits.h: every layout and MMA of the kernel that computes dQ where no sums of dQ are
// kept, its barriers and its shared memory, for one row of the table.
//
// A CTA owns tile_m queries, 64 for each consumer warpgroup, and goes through the tiles of keys
// that they see. It computes S and dP once more, so that nobody has to add anything in global
// memory.
#pragma once

#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm90/backward_traits.h"

namespace cute_attention::sm90 {

// A tile of queries and the KV tiles that it needs, in shared memory. The load warp writes it, and
// the consumers read it.
struct GradQWork {
  WorkTile tile;
  Sequence sequence;
  KvTiles kv;

  CUTE_DEVICE bool is_end() const { return tile.m_block < 0; }  // there are no more tiles
};

template <class Row>
struct GradQTraits {
  using OfRow = Row;
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kStepRows;  // keys of a step
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  static constexpr int kThreads = kConfig.warps * 32;
  using Element = ElementOf<kKey.dtype>;

  // One warpgroup loads, the others own 64 queries each.
  static constexpr int kConsumers = kTileM / kWarpgroupM;
  using Registers = WarpgroupRegisters<kConsumers>;
  static_assert(kConfig.warps == (kConsumers + 1) * kWarpgroupWarps,
                "a producer warpgroup and tile_m / 64 consumers");

  // S = Q K^T and dP = dO V^T, both operands from shared memory.
  template <int kDepth>
  using MmaOfScores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileN>, cute::Int<kDepth>>>()));
  using MmaS = MmaOfScores<kHeadDim>;
  using MmaP = MmaOfScores<kHeadDimV>;
  // dQ += dS K, with dS from registers.
  using MmaQ = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kHeadDim>, cute::Int<kTileN>>,
          cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  static constexpr int kBytesQ = kWarpgroupM * kHeadDim * int(sizeof(Element));  // of a warpgroup
  static constexpr int kBytesGradO = kWarpgroupM * kHeadDimV * int(sizeof(Element));  // likewise
  static constexpr int kBytesK = kTileN * kHeadDim * int(sizeof(Element));   // of one stage
  static constexpr int kBytesV = kTileN * kHeadDimV * int(sizeof(Element));  // of one stage

  // K is read from the first product of a step to the last, and V by one: a second buffer of V, or
  // a third of K, only where there is room.
  static constexpr int kRoom = max_shared_memory(kKey.arch) - 2048 -
                               kConsumers * (kBytesQ + kBytesGradO) - 2 * kBytesK - kBytesV;
  static constexpr int kStagesV = kRoom >= kBytesV ? 2 : 1;
  static constexpr int kStagesK = kRoom >= kBytesV + kBytesK ? 3 : 2;

  // Columns of a box of Q and K, and of V and dO.
  static constexpr int kBox = narrow_box_cols<kHeadDim>(StudyOf<Row>::kSwizzle);
  static constexpr int kBoxV = narrow_box_cols<kHeadDimV>(StudyOf<Row>::kSwizzle);
  using SmemLayoutQ =
      SmemTiles<Element, kWarpgroupM, kHeadDim, kConsumers, kBox>;  // (64, D, WARPGROUP)
  using SmemLayoutGradO =
      SmemTiles<Element, kWarpgroupM, kHeadDimV, kConsumers, kBoxV>;         // (64, DV, WARPGROUP)
  using SmemLayoutK = SmemTiles<Element, kTileN, kHeadDim, kStagesK, kBox>;  // (N, D, STAGE)
  using SmemLayoutKt =
      SmemTilesTransposed<Element, kTileN, kHeadDim, kStagesK, kBox>;          // (D, N, STAGE)
  using SmemLayoutV = SmemTiles<Element, kTileN, kHeadDimV, kStagesV, kBoxV>;  // (N, DV, STAGE)

  struct SharedMemory {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutQ>, 1024> q;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutGradO>, 1024> grad_o;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutK>, 1024> k;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutV>, 1024> v;

    GradQWork works[kWorkSlots];

    // As in backward_traits.h.
    uint64_t work_full[kWorkSlots];   // 1 arrival
    uint64_t work_empty[kWorkSlots];  // kConsumers * kWarpgroupWarps arrivals
    uint64_t query_full;              // 1 arrival
    uint64_t query_empty;             // kConsumers * kWarpgroupWarps arrivals
    uint64_t grad_o_full;             // 1 arrival
    uint64_t grad_o_empty;            // kConsumers * kWarpgroupWarps arrivals
    uint64_t key_full[kStagesK];      // 1 arrival
    uint64_t key_empty[kStagesK];     // kConsumers * kWarpgroupWarps arrivals
    uint64_t value_full[kStagesV];    // 1 arrival
    uint64_t value_empty[kStagesV];   // kConsumers * kWarpgroupWarps arrivals
    uint64_t landed;  // a tile that the load warp has to mend before it is full: 1 arrival
  };
  static_assert(sizeof(SharedMemory) <= max_shared_memory(kKey.arch), "shared memory of a CTA");
};

}  // namespace cute_attention::sm90
