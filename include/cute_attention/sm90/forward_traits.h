// sm90/forward_traits.h: every layout and MMA of the sm90 forward kernel, its barriers and its
// shared memory, for one row of the table.
//
// To change how the kernel moves or multiplies, change this file (or the row's tile in
// src/kernels/forward.def); the kernel follows.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "cute_attention/core/resident_warps.h"
#include "cute_attention/element.h"
#include "cute_attention/sm90/alibi_product.h"
#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/cached_keys.h"
#include "cute_attention/sm90/float_bias.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/key_bias.h"
#include "cute_attention/sm90/smem_tiles.h"
#include "cute_attention/sm90/warpgroup.h"
#include "cute_attention/study.h"

namespace cute_attention::sm90 {

// Of each consumer warpgroup, the number of the last tile of queries that was unusual
// (forward_compute.h), where that is told.
template <bool kTold, int kConsumers>
struct UnusualTiles {};
template <int kConsumers>
struct UnusualTiles<true, kConsumers> {
  uint32_t unusual[kConsumers];
};

// O of each consumer warpgroup on its way to global memory, where TMA stores it (output_boxes.h).
template <bool kStored, class Element, class Layout>
struct OutputBuffer {};
template <class Element, class Layout>
struct OutputBuffer<true, Element, Layout> {
  cute::array_aligned<Element, cute::cosize_v<Layout>, 1024> o;
};

template <class Row>
struct ForwardTraits {
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

  // One warpgroup loads, the others compute 64 queries each.
  static constexpr int kConsumers = kTileM / kWarpgroupM;
  static_assert(kConfig.warps == (kConsumers + 1) * kWarpgroupWarps,
                "a producer warpgroup and tile_m / 64 consumers");

  static constexpr int kBytesQ = kWarpgroupM * kHeadDim * int(sizeof(Element));  // of one warpgroup
  static constexpr int kBytesK = kTileN * kHeadDim * int(sizeof(Element));       // of one stage
  static constexpr int kBytesV = kTileN * kHeadDimV * int(sizeof(Element));      // of one stage
  static constexpr int kBytesO =
      kWarpgroupM * kHeadDimV * int(sizeof(Element));  // of one warpgroup

  // How many CTAs share an SM. Where a head has few tokens or few keys, a warpgroup mostly does one
  // thing after another: it waits for Q, computes two or three products, and stores O. So CTAs of
  // head dim 64 share an SM, with four consumers in all, where a consumer has registers for its
  // tile and all tiles fit into shared memory: one CTA computes while another waits. CUDA keeps 1
  // KB of shared memory of each for itself.
  static constexpr int kMostKeysBeside = kConsumers == 1 ? 64 : kConsumers == 2 ? 80 : 0;
  static constexpr bool kIsSmall = kTileN <= kMostKeysBeside && kHeadDim <= 64 && kHeadDimV <= 64 &&
                                   kKey.score_mods == score_mods::None && !kReadsCache<Row>;
  static constexpr bool kSharesSm =
      kIsSmall && Study::kGrid != Grid::OneTile && Study::kTurns != Turns::Taken &&
      Study::kReference != Reference::Exact &&
      kConsumersOfSm / kConsumers *
              (kConsumers * (kBytesQ + kBytesO) + kStages * (kBytesK + kBytesV) + 2048 + 1024) <=
          max_shared_memory(kKey.arch) + 1024;
  static constexpr int kCtasOfSm = kSharesSm ? kConsumersOfSm / kConsumers : 1;
  using Registers = WarpgroupRegisters<kConsumers, kCtasOfSm>;

  // Warpgroups take turns at the tensor cores where one's softmax is as long as its products. At
  // 192/128 turns, and the softmax that goes with them, make the kernel 1 to 9 % faster (H200).
  static constexpr bool kTakeTurns =
      kConsumers > 1 && !kSharesSm &&
      (Study::kTurns == Turns::Taken || (Study::kTurns == Turns::WhereTheyPay && kHeadDimV <= 128));

  // Whether Q is released without a branch (ForwardSync::release_query_if). Where V has 96 or 128
  // columns that makes the plain kernel up to 5 % faster, full and causal. At head dim 64 it is 1
  // to 5 % faster at 1024 tokens and 3 % slower at 16384, at 256 5 % slower there (H200).
  static constexpr bool kStraightRelease =
      (kHeadDimV == 96 || kHeadDimV == 128) && kKey.score_mods == score_mods::None;

  // S = Q K^T, both from shared memory; O = P V, P from registers. Each warpgroup owns its rows:
  // softmax needs no other.
  using MmaQK = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileN>, cute::Int<kHeadDim>>>()));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kHeadDimV>, cute::Int<kTileN>>,
          cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  // Where warpgroups take turns, O has ended when a warpgroup begins its softmax, which is what the
  // other one waits for: it is as short as can be. Where they do not, O is long, and the softmax
  // runs beside it in place.
  static constexpr bool kStraight = Study::kReference == Reference::Exact ||
                                    (Study::kReference == Reference::WhereItPays && kTakeTurns);
  // Whether warps tell each other of unusual bases (forward_compute.h): rows with a bias, which
  // hides keys where sequences are padded. Calls whose keys are hidden but for 64 take 1.11 to 1.17
  // of the time of others then, and 1.31 to 1.39 without it (H200). Others would lose: 8 % without
  // features at head dim 64 and 512 tokens, 6 % with dropout there, 1 % with ALiBi.
  static constexpr bool kTellsUnusual =
      kStraight && kTakeTurns && kKey.score_mods == score_mods::Bias;
  // Whether the tensor cores compute ALiBi (alibi_product.h). Over rows whose scores get their
  // terms one by one it is 1.03 to 1.09 times faster at head dim 64 (H200; with dropout H100), 1.00
  // to 1.13 at 128 and 1.01 to 1.05 at 256 (H100). The kernel for caches would spill.
  static constexpr bool kAlibiProduct =
      !kReadsCache<Row> &&
      (kKey.score_mods == score_mods::Alibi ||
       (kHeadDim <= 64 && kKey.score_mods == (score_mods::Alibi | score_mods::Dropout)));
  // Whether a thread keeps what a step needs to know of the diagonal for that (1.02 to 1.07 times
  // faster at head dim 64). With dropout it would spill, and so it would at 256, where a step has
  // time to compute it.
  static constexpr bool kKeepsDiagonals = kStraight && kKey.score_mods == score_mods::Alibi;
  // Whether what dropout drops is cleared block by block beside the exponentials, which leave a
  // warp time to draw: 1.01 to 1.07 times faster at head dim 128. At 64 it spills, but for forms
  // that have 0.90 to 1.05 of the speed (H100).
  static constexpr bool kDropsBeside =
      kStraight && kHeadDim > 64 && kKey.score_mods == score_mods::Dropout;
  // Whether KV tiles without a mask have a loop of their own (forward_compute.h): with a bias or
  // dropout alone it gained nothing, and with softcap and ALiBi together, and at head dims 192 and
  // 128, it would spill.
  static constexpr bool kUnmaskedLoop =
      kStraight && kHeadDim == kHeadDimV && kKey.score_mods != score_mods::Bias &&
      kKey.score_mods != score_mods::Dropout &&
      kKey.score_mods != (score_mods::Softcap | score_mods::Alibi);
  // Whether a thread computes the exponentials of its two rows one row after the other, and waits
  // for O behind them: up to 1.04 times faster at head dim 128, 1.00 to 1.01 at 64, 1.02 with 128
  // queries at 96. With 192 queries at 96, with 128 at 64, and at 192/128 it loses up to 1 %
  // (H100).
  static constexpr bool kRowByRow =
      kStraight && kKey.score_mods == score_mods::None && kHeadDim == kHeadDimV &&
      (kHeadDim == 128 || (kHeadDim == 96 && kTileM == 128) || (kHeadDim == 64 && kTileM == 192));
  // How StraightSoftmax::raise() computes factors. In cycles a minimum is 1.002 to 1.008 times as
  // fast at head dim 64 and 1.01 to 1.02 at 128 with ALiBi, but 0.98 at 64 with ALiBi, at 96 with
  // 192 queries and at 128 with a bias (H100). At 128 without features it is 1.01 times as fast
  // with kReleasesQueryLate, and 0.96 to 1.00 without that.
  static constexpr bool kFactorsByMinimum =
      kRowByRow || (kHeadDim == 128 && kKey.score_mods == score_mods::Alibi);
  // Whether CTAs take the tiles of a dense causal call from a counter (forward_schedule.h). At head
  // dim 96 they have 0.95 to 0.99 of the speed then, elsewhere up to 1.11 (H100).
  static constexpr bool kCountsCausalTiles = kHeadDim != 96;
  using MmaPlaces = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileN>, cute::Int<kPlaceCols>>,
          cute::GMMA::Major::K, cute::GMMA::Major::K>()));

  // A tile of the bias, or a number for each key, comes with K, and is released with it.
  static constexpr bool kBiasTiles = sm90::kBiasTiles<Row>;
  static constexpr bool kFloatBias = kColumnsOfNumber<Row> > 1;
  static constexpr int kBiasCols = kTileN * kColumnsOfNumber<Row>;  // of 16 bits
  static constexpr bool kKeyBias = sm90::kKeyBias<Row>;
  static constexpr bool kBiasBesideK = kBiasTiles || kKeyBias;
  static constexpr int kBytesBias = kBiasTiles ? kTileM * kBiasCols * int(sizeof(Element))
                                    : kKeyBias ? kTileN * int(sizeof(float))
                                               : 0;

  // Two buffers of Q where they fit, so that the next tile's Q need not wait for the last S of this
  // one. With CTAs that share an SM one is as fast.
  static constexpr int kStagesQ =
      !kSharesSm && 2 * kConsumers * kBytesQ + kStages * (kBytesK + kBytesV + kBytesBias) + 2048 +
                            (kAlibiProduct ? 2 * kTileN * kStoredPlaceCols : 0) <=
                        max_shared_memory(kKey.arch)
          ? 2
          : 1;

  // Whether the Q of a tile is released behind its last softmax, not in the step that computes its
  // last S. Then the descriptors of Q stay in uniform registers from step to step: 489 instructions
  // instead of 523 at head dim 128, 444 instead of 465 at 64.
  static constexpr bool kReleasesQueryLate = kRowByRow && kStagesQ > 1;

  // Whether O goes through shared memory and leaves by TMA (output_boxes.h), which takes fewer
  // instructions than stores by threads: where CTAs share an SM, whose instruction slots their
  // warps compete for, and in other rows of head dims 64 and 128 without score features, in which
  // it is mostly 1.00 to 1.04 times as fast (H200). Others have no room for it, or were not
  // measured.
  static constexpr int kBytesWithO =
      kConsumers * (kStagesQ * kBytesQ + kBytesO) + kStages * (kBytesK + kBytesV) + 2048;
  static constexpr bool kStoresBoxes =
      kSharesSm ||
      (kKey.score_mods == score_mods::None && !kReadsCache<Row> && Study::kGrid != Grid::OneTile &&
       kHeadDim == kHeadDimV && (kHeadDim == 64 || kHeadDim == 128) &&
       kBytesWithO <= max_shared_memory(kKey.arch));

  // Columns of a box of Q and K, and of V.
  static constexpr int kBox = narrow_box_cols<kHeadDim>(Study::kSwizzle);
  static constexpr int kBoxV = narrow_box_cols<kHeadDimV>(Study::kSwizzle);
  using SmemLayoutQ = SmemTiles<Element, kWarpgroupM, kHeadDim, kConsumers * kStagesQ,
                                kBox>;                                        // (64, D, WARPGROUP)
  using SmemLayoutK = SmemTiles<Element, kTileN, kHeadDim, kStages, kBox>;    // (N, D, STAGE)
  using SmemLayoutV = SmemTiles<Element, kTileN, kHeadDimV, kStages, kBoxV>;  // (N, DV, STAGE)
  using SmemLayoutVt =
      SmemTilesTransposed<Element, kTileN, kHeadDimV, kStages, kBoxV>;  // (DV, N, STAGE)

  // A thread's rows and columns of O are those of its accumulator.
  using SmemLayoutO =
      SmemTiles<Element, kWarpgroupM, kHeadDimV, kConsumers, kBoxV>;  // (64, DV, WARPGROUP)
  using SmemCopyO = decltype(cute::make_tiled_copy_C(
      cute::Copy_Atom<cute::SM90_U32x4_STSM_N, Element>{}, MmaPV{}));

  struct SharedMemory : KeyPlaces<kAlibiProduct, Element, kTileN>,
                        BiasBuffer<kBiasTiles, Element, kTileM, kBiasCols, kStages>,
                        KeyBiasBuffer<kKeyBias, kTileN, kStages>,
                        UnusualTiles<kTellsUnusual, kConsumers>,
                        OutputBuffer<kStoresBoxes, Element, SmemLayoutO> {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutQ>, 1024> q;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutK>, 1024> k;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutV>, 1024> v;

    ForwardTile tiles[kTileSlots];

    // Full: the producer arrives once with the bytes to come, TMA brings them; the consumers wait.
    // Empty: each warp of each reading warpgroup arrives once its MMAs have read the buffer; the
    // producer waits.
    uint64_t query_full[kStagesQ][kConsumers];   // one a warpgroup, 1 arrival
    uint64_t query_empty[kStagesQ][kConsumers];  // kWarpgroupWarps arrivals
    uint64_t key_full[kStages];                  // 1 arrival
    uint64_t key_empty[kStages];                 // kConsumers * kWarpgroupWarps arrivals
    uint64_t value_full[kStages];                // 1 arrival
    uint64_t value_empty[kStages];               // kConsumers * kWarpgroupWarps arrivals
    uint64_t tile_full[kTileSlots];              // 1 arrival, of the scheduler warp
    uint64_t tile_empty[kTileSlots];             // all consumer warps and the load warps
    uint64_t next_wanted;                        // 1 arrival, of the load warp (tile_load.h)
    uint64_t value_landed;  // a V tile that the producer has to mend before it is full: 1 arrival
  };

  static_assert(kTileM % kWarpgroupM == 0 && kTileN % 16 == 0 && kTileN <= 256,
                "MMA and TMA box sizes");
  // A consumer waits for the next V before it releases this one, and keeps its turn until the next
  // K is there, which another one may have to release first.
  static_assert(kStages >= 2, "K and V of two KV tiles");
  static_assert(kHeadDim % 32 == 0 && kHeadDimV % 32 == 0 && kHeadDimV <= 256,
                "swizzle block and MMA sizes");
  // The selectors fall back to narrower WGMMAs where they do not know one of this N.
  static_assert(
      decltype(cute::size<1>(typename MmaQK::AtomShape_MNK{}))::value == kTileN &&
          decltype(cute::size<1>(typename MmaPV::AtomShape_MNK{}))::value == kHeadDimV,
      "N of a WGMMA: define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED, as kernels.cmake does");
  static_assert(kCtasOfSm * (sizeof(SharedMemory) + 1024) <= max_shared_memory(kKey.arch) + 1024,
                "shared memory of the CTAs of an SM");
};

}  // namespace cute_attention::sm90
