// sm90/grad_kv_traits.h: every layout and MMA of the kernel that computes dK and dV where no sums
// of dQ are kept, its barriers and its shared memory, for one row of the table.
//
// A CTA owns 64 keys. Accumulators of dK and dV together would be more than a warpgroup's registers
// hold, so one warpgroup computes S, P and dV, and the other dP, dS and dK. As in
// backward_traits.h, scores are computed transposed: P^T and dS^T come out of the accumulators as
// operands of dV and dK.
#pragma once

#include "cute_attention/sm90/backward_traits.h"

namespace cute_attention::sm90 {

template <class Row>
struct GradKvTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr int kTileM = kStepRows;  // queries of a step
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  static constexpr int kThreads = kConfig.warps * 32;
  static constexpr bool kHasSums = false;  // of dQ
  static constexpr bool kBeginsEarly = false;
  static constexpr bool kOverlapsBlocks = false;
  static constexpr bool kOneTile = sm90::kOneTile<Row>;
  static constexpr bool kAnyOrder = false;   // not measured above head dim 128
  static constexpr bool kBiasTiles = false;  // shared memory has no room for them
  static constexpr bool kBiasOfWarpgroups = false;
  static constexpr bool kKeyBias = false;
  using Element = ElementOf<kKey.dtype>;

  // One warpgroup loads. Of the others, number kOfV computes dV and number kOfK computes dK.
  static constexpr int kConsumers = 2;
  static constexpr int kOfV = 0;
  static constexpr int kOfK = 1;
  using Registers = WarpgroupRegisters<kConsumers>;
  static constexpr int kSumThreads = 256;  // of a CTA that adds up the parts of blocks of keys
  static_assert(kConfig.warps == (kConsumers + 1) * kWarpgroupWarps,
                "a producer warpgroup and two consumers");
  static_assert(kTileN == kWarpgroupM, "a warpgroup's accumulators have all keys of the CTA");
  // Q and dO of a step are released in the next one.
  static_assert(kStages >= 2, "Q and dO of two steps");

  // S^T = K Q^T and dP^T = V dO^T, both operands from shared memory.
  template <int kDepth>
  using MmaOfScores = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kTileN>, cute::Int<kTileM>, cute::Int<kDepth>>>()));
  using MmaS = MmaOfScores<kHeadDim>;
  using MmaP = MmaOfScores<kHeadDimV>;
  // dV += P^T dO and dK += dS^T Q, with P^T and dS^T from registers.
  template <int kCols>
  using MmaOfGradient = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kTileN>, cute::Int<kCols>, cute::Int<kTileM>>, cute::GMMA::Major::K,
          cute::GMMA::Major::MN>()));
  using MmaV = MmaOfGradient<kHeadDimV>;
  using MmaK = MmaOfGradient<kHeadDim>;

  // Columns of a box of Q and K, and of V and dO.
  static constexpr int kBox = narrow_box_cols<kHeadDim>(StudyOf<Row>::kSwizzle);
  static constexpr int kBoxV = narrow_box_cols<kHeadDimV>(StudyOf<Row>::kSwizzle);
  static constexpr int kBoxColsK = kBox;
  static constexpr int kStagesK = 1;                                        // buffers of K
  using SmemLayoutK = SmemTiles<Element, kTileN, kHeadDim, 1, kBox>;        // (N, D, 1)
  using SmemLayoutV = SmemTiles<Element, kTileN, kHeadDimV, 1, kBoxV>;      // (N, DV, 1)
  using SmemLayoutQ = SmemTiles<Element, kTileM, kHeadDim, kStages, kBox>;  // (M, D, STAGE)
  using SmemLayoutQt =
      SmemTilesTransposed<Element, kTileM, kHeadDim, kStages, kBox>;              // (D, M, STAGE)
  using SmemLayoutGradO = SmemTiles<Element, kTileM, kHeadDimV, kStages, kBoxV>;  // (M, DV, STAGE)
  using SmemLayoutGradOt =
      SmemTilesTransposed<Element, kTileM, kHeadDimV, kStages, kBoxV>;  // (DV, M, STAGE)
  // One number for each query, as a tile (N, M): all keys see the same number.
  using SmemLayoutRow = cute::Layout<cute::Shape<cute::Int<kTileN>, cute::Int<kTileM>>,
                                     cute::Stride<cute::_0, cute::_1>>;

  static constexpr int kBytesK = kTileN * kHeadDim * int(sizeof(Element));       // of one stage
  static constexpr int kBytesQ = kTileM * kHeadDim * int(sizeof(Element));       // of one stage
  static constexpr int kBytesGradO = kTileM * kHeadDimV * int(sizeof(Element));  // of one stage

  // Buffers of factors: the warpgroup of dV may be one step ahead.
  static constexpr int kStagesFactor = 2;
  // Which vector of four floats of a buffer is vector v of a thread's factors, in the order of its
  // accumulator. A warp writes and reads whole rows of banks.
  CUTE_HOST_DEVICE static constexpr int factor_vector(int v, int thread) {
    return v * kWarpgroupThreads + thread;
  }

  struct SharedMemory {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutK>, 1024> k;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutV>, 1024> v;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutQ>, 1024> q;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutGradO>, 1024> grad_o;
    // What dP + delta of each score is multiplied with, in floats: dS would lose accuracy if P were
    // rounded. Each thread of the warpgroup of dV writes what the same thread of the other reads.
    alignas(128) float factor[kStagesFactor][kTileN * kTileM];
    alignas(128) float lse[kStages][kTileM];
    alignas(128) float delta[kStages][kTileM];

    BackwardWork works[kWorkSlots];
    BackwardStage<kKey.score_mods, kTileM> stages[kStages];

    // As in backward_traits.h.
    uint64_t work_full[kWorkSlots];        // 1 arrival
    uint64_t work_empty[kWorkSlots];       // kConsumers * kWarpgroupWarps arrivals
    uint64_t key_full[kStagesK];           // 1 arrival
    uint64_t key_empty[kStagesK];          // kWarpgroupWarps arrivals
    uint64_t value_full;                   // 1 arrival
    uint64_t value_empty;                  // kWarpgroupWarps arrivals
    uint64_t query_full[kStages];          // Q and the LSE: 2 arrivals
    uint64_t query_empty[kStages];         // kConsumers * kWarpgroupWarps arrivals
    uint64_t grad_o_full[kStages];         // dO and delta: 2 arrivals
    uint64_t grad_o_empty[kStages];        // kConsumers * kWarpgroupWarps arrivals
    uint64_t factor_full[kStagesFactor];   // kWarpgroupWarps arrivals
    uint64_t factor_empty[kStagesFactor];  // kWarpgroupWarps arrivals
    uint64_t landed;  // a tile that the load warp has to mend before it is full: 1 arrival
  };
  static_assert(sizeof(SharedMemory) <= max_shared_memory(kKey.arch), "shared memory of a CTA");
};

}  // namespace cute_attention::sm90
