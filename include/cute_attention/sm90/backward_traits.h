// sm90/backward_traits.h: every layout and MMA of the sm90 backward kernel, its barriers and its
// shared memory, for one row of the table.
//
// Scores are computed transposed, S^T = K Q^T: then P^T and dS^T come out of the accumulators as
// the A operands of dV += P^T dO and dK += dS^T Q, from registers. A warpgroup owns 64 keys.
#pragma once

#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include "cute_attention/core/dropout_words.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/score_mod.h"
#include "cute_attention/element.h"
#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/bias_tiles.h"
#include "cute_attention/sm90/complete_heads.h"
#include "cute_attention/sm90/few_keys.h"
#include "cute_attention/sm90/float_bias.h"
#include "cute_attention/sm90/key_bias.h"
#include "cute_attention/sm90/smem_tiles.h"
#include "cute_attention/sm90/warpgroup.h"
#include "cute_attention/sm90/warpgroup_bias.h"
#include "cute_attention/study.h"

namespace cute_attention::sm90 {

// What the kernel is given; constant over the grid.
struct BackwardArguments {
  BackwardParams params;
  GradSchedule schedule;
  int32_t* next_tile;         // how many tiles CTAs have taken beside their first
  float const* lse_log2;      // that of all queries, as params.delta has delta
  int32_t* sum_states;        // sum_states() of sm90/backward_states.h
  CUtensorMap map_q;          // boxes of tile_m rows
  CUtensorMap map_grad_o;     // boxes of tile_m rows
  CUtensorMap map_k;          // boxes of tile_n rows
  CUtensorMap map_v;          // boxes of tile_n rows
  BiasTiles bias;             // of tile_m rows; unused where the kernel reads no such tiles
  bool bias_is_aligned;       // tma_loads_bias(); unused likewise where it reads them
  bool stores_grad_bias;      // stores_grad_bias() of sm90/backward_grad_bias.h
  CUtensorMap map_grad_bias;  // boxes of tile_m rows and 64 keys; unused where it is not stored
  CompleteHeads complete;     // heads whose dQ is written before the kernel ends
};

// A part of the steps of a block of keys, in shared memory. The load warp writes it, and all other
// warps read it.
struct BackwardWork {
  GradTile tile;
  Sequence sequence;
  MTiles tiles;     // that the block needs
  StepRange steps;  // of the part

  CUTE_DEVICE bool is_end() const { return tile.n_block < 0; }  // there are no more blocks
};

// How many blocks of keys a CTA knows at a time: the one that the consumers compute, and the next,
// whose queries are loaded while they still compute.
constexpr int kWorkSlots = 2;

// Queries, or keys, of a step of the kernels that keep no sums of dQ (grad_kv_traits.h,
// grad_q_traits.h).
constexpr int kStepRows = 64;

// A thread's part of `numbers` (M), one number for each query, as if it were an accumulator of S^T:
// (MMA, MMA_N, MMA_M).
template <class Traits>
CUTE_DEVICE auto row_numbers(int thread, float const* numbers) {
  using namespace cute;
  return typename Traits::MmaS{}
      .get_slice(opaque(thread))
      .partition_C(
          make_tensor(make_smem_ptr(numbers), typename Traits::SmemLayoutRow{}));  // (N, M)
}

// Whether one kernel of a row computes dK and dV and adds dQ to sums in global memory
// (backward_kernel.h). If not, one kernel computes dK and dV, and another dQ (grad_kv_kernel.h,
// grad_q_kernel.h): above head dim 128 the accumulators of a warpgroup do not hold dK and dV of 64
// keys beside scores and dQ, but at 192/128, in the row with blocks of 128 keys (kInChunks).
template <class Row>
constexpr bool kSumsGradQ = (Row::kKey.head_dim <= 128 || Row::kConfig.tile_n > kWarpgroupM) &&
                            StudyOf<Row>::kGradQSums == GradQSums::WhereTheyFit;

// Whether a CTA computes one block of keys, or one tile of queries of dQ, and no other.
template <class Row>
constexpr bool kOneTile = StudyOf<Row>::kGrid == Grid::OneTile;

// The queries of a stage, in shared memory: their tile, what the modifiers need to know of their
// head, and their random words.
template <uint32_t kScoreMods, int kTileM>
struct BackwardStage : ScoreModifiers<kScoreMods>::Terms::OfHead,
                       DropoutWords<has_dropout(kScoreMods), kTileM> {
  using OfHead = typename ScoreModifiers<kScoreMods>::Terms::OfHead;
  int32_t m_block;
};

// What the warp that writes dQ of complete heads has in shared memory (grad_q_writer.h), and those
// that count.
template <bool kCountsHeads, int kNumbers, int kAdders>
struct WriterMemory {
  alignas(128) float sums[kNumbers];  // of a part
  uint64_t full;                      // the sums are there: 1 arrival
  uint64_t ended;                     // the CTA has no more blocks: 1 arrival for each that adds
  int32_t counted_head[kAdders];      // of the block that an adding warp has had before
};
template <int kNumbers, int kAdders>
struct WriterMemory<false, kNumbers, kAdders> {};

// Where of 2 * kStages slots the step that is in this phase of a stage has its own.
template <int kStages>
CUTE_DEVICE uint32_t tile_slot(Ring<kStages> const& ring) {
  return ring.stage + kStages * ring.parity;
}

// Which queries a step has, in shared memory: what a consumer needs to know where it writes dQ
// itself.
struct StepTile {
  int32_t head;
  int32_t m_block;
};

template <class Row>
struct BackwardTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr KernelConfig kConfig = Row::kConfig;
  static constexpr int kTileM = kConfig.tile_m;
  static constexpr int kTileN = kConfig.tile_n;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  static constexpr int kThreads = kConfig.warps * 32;
  // In backward_finish each warpgroup takes the part of dQ that one of the backward kernel
  // computed.
  static constexpr int kFinishThreads = kConfig.tile_n / kWarpgroupM * kWarpgroupThreads;
  static constexpr bool kHasSums = true;  // of dQ (core/backward_prepare.h)
  static constexpr bool kOneTile = sm90::kOneTile<Row>;
  using Element = ElementOf<kKey.dtype>;

  // One warpgroup loads, the others own 64 keys each.
  static constexpr int kConsumers = kTileN / kWarpgroupM;
  static constexpr int kCtasOfSm = kIsFewKeys<Row> ? 2 : 1;
  using Registers = WarpgroupRegisters<kConsumers, kCtasOfSm>;
  static_assert(kConfig.warps == (kConsumers + 1) * kWarpgroupWarps,
                "a producer warpgroup and tile_n / 64 consumers");
  static_assert(kConsumers < kWarpgroupWarps,
                "the producer has a warp that loads, and one for each part of dQ");
  // Q and dO of a step are released in the next one, which may be the first of the next block.
  static_assert(kStages >= 2, "Q and dO of two steps");

  // A tile of the bias comes with Q of a step, and is released with it. Where two tiles do not fit,
  // each warpgroup has one for its keys, with barriers of its own (warpgroup_bias.h): in fp32, and
  // with steps of 128 queries. Numbers of keys are in registers.
  static constexpr bool kBiasTiles = sm90::kBiasTiles<Row>;
  static constexpr bool kFloatBias = kColumnsOfNumber<Row> > 1;
  static constexpr bool kKeyBias = sm90::kKeyBias<Row>;
  static constexpr bool kBiasOfWarpgroups = kBiasTiles && (kFloatBias || kTileM > 64);
  static constexpr int kBiasCols = kColumnsOfNumber<Row> * kWarpgroupM;  // of a warpgroup
  // Whether the kernel may begin before the one before it has ended (backward_load.h). Where a
  // thread has the addresses of a bias in global memory beside softcap, at head dim 128, it would
  // spill.
  static constexpr uint32_t kSoftcapAndBias = score_mods::Softcap | score_mods::Bias;
  static constexpr bool kBeginsEarly = kHeadDim <= 64 || kBiasTiles || kKeyBias ||
                                       (kKey.score_mods & kSoftcapAndBias) != kSoftcapAndBias;
  static_assert(!kBiasOfWarpgroups || kStages == 2, "a step of each two has the first stage");

  // dQ of a step is cut into one part for each warpgroup: 64 queries of some of the columns.
  static constexpr int kRowPartsQ = kTileM / kWarpgroupM;
  static constexpr int kColPartsQ = kConsumers / kRowPartsQ;
  static constexpr int kColsQ = kHeadDim / kColPartsQ;
  // The columns of a box of Q, of V and dO, and of K: a part has whole boxes of K.
  static constexpr int kSwizzle = StudyOf<Row>::kSwizzle;
  static constexpr int kBox = narrow_box_cols<kHeadDim>(kSwizzle);
  static constexpr int kBoxV = narrow_box_cols<kHeadDimV>(kSwizzle);
  static constexpr int kBoxColsK = narrow_box_cols<kColsQ>(kSwizzle);
  static_assert(kRowPartsQ * kColPartsQ == kConsumers && kColPartsQ * kColsQ == kHeadDim,
                "every warpgroup has a part of dQ");
  // The part of a warpgroup: which 64 queries, and which kColsQ columns.
  CUTE_HOST_DEVICE static constexpr int row_part_q(int warpgroup) { return warpgroup % kRowPartsQ; }
  CUTE_HOST_DEVICE static constexpr int col_part_q(int warpgroup) { return warpgroup / kRowPartsQ; }

  // Whether dP and dS of a step are computed for 32 queries after the other 32, and dQ of the step
  // before at its beginning (backward_chunks.h): where dK and dV leave no registers for S, dP and
  // dQ together.
  static constexpr bool kInChunks = kHeadDim > 128;
  static constexpr int kChunkM = kInChunks ? 32 : kTileM;
  static_assert(!kInChunks ||
                    (kHeadDim <= 192 && kHeadDimV <= 128 && kKey.score_mods == score_mods::None &&
                     StudyOf<Row>::kGradQ == GradQ::WhereItPays),
                "dK and dV are 160 registers of a thread; the steps are those of plain scores");

  // Whether dQ of the step before is started before dS of the step is computed, not after
  // (backward_compute.h). Then S, dP, dQ, dK and dV are in accumulators at the same time, 224
  // floats of a thread in both rows. Measured on an H200, full and causal, 16k tokens: at head dim
  // 64 550 and 545 instead of 505 and 508 TFLOP/s; at 128 ptxas spills and lets no two products
  // overlap (C7512), 434 and 426 instead of 619 and 615. At 96 it spills 80 bytes.
  static constexpr GradQ kGradQ = StudyOf<Row>::kGradQ;
  static constexpr bool kGradQFirst =
      kGradQ == GradQ::First || (kGradQ == GradQ::WhereItPays && kHeadDim <= 64 &&
                                 kKey.score_mods == score_mods::None && !kIsFewKeys<Row>);
  // How many steps late dQ is computed.
  static constexpr int kGradQLag = kGradQ == GradQ::Same || kIsFewKeys<Row> ? 0 : 1;

  // Whether a step tells others of the dS and dQ that it has written only in the next step, when S
  // and dP of that are under way (backward_compute.h). In cycles 1.03 to 1.04 times as fast at head
  // dim 128, 1.01 at 96, 1.07 at 64 with ALiBi and 1.01 with dropout. At 64 it is 0.92 to 0.97
  // times as fast where dQ comes before dS, and 0.97 to 1.00 with softcap. With a bias alone it
  // spills.
  static constexpr bool kTellsLate = !kInChunks && kGradQ == GradQ::WhereItPays &&
                                     (kHeadDim > 64 ? kKey.score_mods != score_mods::Bias
                                                    : kKey.score_mods == score_mods::Alibi ||
                                                          kKey.score_mods == score_mods::Dropout);

  // Whether a step loads the LSE, and asks whether its tile is masked, before S is there: 1.01
  // times as fast in cycles. At head dim 128 it is 0.97 to 1.00 times as fast with ALiBi and
  // softcap, and 1.00 to 1.01 with dropout. At 64 the LSE has no registers (H100). The other rows
  // have not been measured so.
  static constexpr bool kAsksEarly =
      kTellsLate && kHeadDim > 64 && kKey.score_mods == score_mods::None;

  // Whether the row also has a kernel that writes dQ where one block of keys is all that a query
  // sees (core/grad_parts.h, has_one_adder()). With softcap or dropout some would spill. Calls with
  // few keys have no other.
  static constexpr bool kWritesGradQ = kKey.score_mods == score_mods::None && !kInChunks;

  // The rows with the same choices below.
  static constexpr bool kNoneOrAlibiOrSoftcap = kKey.score_mods == score_mods::None ||
                                                kKey.score_mods == score_mods::Alibi ||
                                                kKey.score_mods == score_mods::Softcap;

  // Whether a block may take its steps in another order than down (GradSchedule::order()). For that
  // the load warp of head dim 96 has no registers, nor has that of head dim 64 with dropout: they
  // spilled 8 to 24 bytes. The other rows with modifiers have not been measured so.
  static constexpr bool kAnyOrder = kNoneOrAlibiOrSoftcap && kHeadDim != 96;

  // Whether the kernels before and after may compute what a single key behind the last whole block
  // gives (core/leftover_key.h): where nothing modifies scores.
  static constexpr bool kMayLeaveKey =
      kKey.score_mods == score_mods::None && !kInChunks && !kIsFewKeys<Row>;

  // Whether sums of dQ may begin with a store (backward_states.h). The other rows have not been
  // measured so.
  static constexpr bool kStoresFirst =
      kNoneOrAlibiOrSoftcap || kKey.score_mods == score_mods::Every;

  // Whether dS may be the gradient of the bias, which TMA then stores (backward_grad_bias.h). So it
  // lies in shared memory as in that: keys side by side. With other modifiers dS is another one.
  // In steps of 128 queries no call has it stored (steps_of_64.h), but with keys side by side the
  // kernel needs fewer registers: the other way it spills 8 bytes.
  static constexpr bool kStoresGradS = kKey.score_mods == score_mods::Bias;

  template <class Op>
  using OfConsumers = decltype(cute::make_tiled_mma(
      Op{}, cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>{}));

  // S^T = K Q^T and dP^T = V dO^T, both operands from shared memory.
  using MmaS = OfConsumers<
      decltype(cute::GMMA::ss_op_selector<
               Element, Element, float,
               cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileM>, cute::Int<kHeadDim>>>())>;
  // dP^T of the queries of a chunk.
  using MmaP = OfConsumers<
      decltype(cute::GMMA::ss_op_selector<
               Element, Element, float,
               cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kChunkM>, cute::Int<kHeadDimV>>>())>;
  // dV += P^T dO and dK += dS^T Q, with P^T and dS^T from registers. In chunks dS^T of dK is read
  // from shared memory, where it lies for dQ: no registers hold it.
  using MmaV = OfConsumers<
      decltype(cute::GMMA::rs_op_selector<
               Element, Element, float,
               cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kHeadDimV>, cute::Int<kTileM>>,
               cute::GMMA::Major::K, cute::GMMA::Major::MN>())>;
  using ShapeK = cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kHeadDim>, cute::Int<kTileM>>;
  using MmaK = OfConsumers<std::conditional_t<
      kInChunks,
      decltype(cute::GMMA::ss_op_selector<Element, Element, float, ShapeK, cute::GMMA::Major::K,
                                          cute::GMMA::Major::MN>()),
      decltype(cute::GMMA::rs_op_selector<Element, Element, float, ShapeK, cute::GMMA::Major::K,
                                          cute::GMMA::Major::MN>())>>;
  // A part of dQ = dS K, of all keys.
  using MmaQ = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kColsQ>, cute::Int<kTileN>>,
          kStoresGradS ? cute::GMMA::Major::K : cute::GMMA::Major::MN, cute::GMMA::Major::MN>()));
  // The selectors fall back to narrower WGMMAs where they do not know one of this N.
  template <class Mma>
  static constexpr int kColumnsOf = decltype(cute::size<1>(typename Mma::AtomShape_MNK{}))::value;
  static_assert(
      kColumnsOf<MmaS> == kTileM && kColumnsOf<MmaV> == kHeadDimV && kColumnsOf<MmaK> == kHeadDim &&
          kColumnsOf<MmaQ> == kColsQ,
      "N of a WGMMA: define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED, as kernels.cmake does");

  // Buffers of dS. The step that writes one reads the other, of the step before. In chunks, and
  // where a CTA has one warpgroup, a step has read dS of the step before when it writes its own.
  static constexpr int kStagesS = kInChunks || kIsFewKeys<Row> ? 1 : 2;

  // Buffers of K. With two, blocks overlap: K of the next block comes while this one is computed, V
  // as soon as its last dP is there, and the first step of a block computes dQ of the last step of
  // the block before (backward_compute.h). In cycles 1.03 to 1.06 times as fast at head dim 96; at
  // 128 1.01 to 1.02 times as fast up to 1024 tokens, and 0.98 to 1.00 times from 4096 on (H200).
  // At 64 the consumers spill. The rows with modifiers have not been measured so.
  static constexpr int kStagesK = kBiasTiles || kGradQFirst || kGradQLag == 0 ? 1
                                  : StudyOf<Row>::kKeyStages > 0 ? StudyOf<Row>::kKeyStages
                                  : kHeadDim == 96               ? 2
                                                                 : 1;
  static constexpr bool kOverlapsBlocks = kStagesK > 1;

  using SmemLayoutK = SmemTiles<Element, kTileN, kHeadDim, kStagesK, kBoxColsK>;  // (N, D, STAGE)
  using SmemLayoutKt =
      SmemTilesTransposed<Element, kTileN, kHeadDim, kStagesK, kBoxColsK>;  // (D, N, STAGE)
  using SmemLayoutV = SmemTiles<Element, kTileN, kHeadDimV, 1, kBoxV>;      // (N, DV, 1)
  using SmemLayoutQ = SmemTiles<Element, kTileM, kHeadDim, kStages, kBox>;  // (M, D, STAGE)
  using SmemLayoutQt =
      SmemTilesTransposed<Element, kTileM, kHeadDim, kStages, kBox>;              // (D, M, STAGE)
  using SmemLayoutGradO = SmemTiles<Element, kTileM, kHeadDimV, kStages, kBoxV>;  // (M, DV, STAGE)
  using SmemLayoutGradOt =
      SmemTilesTransposed<Element, kTileM, kHeadDimV, kStages, kBoxV>;  // (DV, M, STAGE)
  // dS as rows of keys, or as rows of queries, of which a warpgroup writes one block.
  static constexpr int kBoxS = narrow_box_cols<kTileM>(kSwizzle);
  using SmemLayoutSt =  // (N, M, STAGE)
      std::conditional_t<kStoresGradS, SmemTilesTransposed<Element, kTileM, kTileN, kStagesS>,
                         SmemTiles<Element, kTileN, kTileM, kStagesS, kBoxS>>;
  using SmemLayoutS =  // (M, N, STAGE)
      std::conditional_t<kStoresGradS, SmemTiles<Element, kTileM, kTileN, kStagesS>,
                         SmemTilesTransposed<Element, kTileN, kTileM, kStagesS, kBoxS>>;
  // One number for each query, as a tile (N, M): all keys see the same number.
  using SmemLayoutRow = cute::Layout<cute::Shape<cute::Int<kTileN>, cute::Int<kTileM>>,
                                     cute::Stride<cute::_0, cute::_1>>;

  // stmatrix writes four 8x8 matrices of dS^T at once, or of dS.
  using StoreS = std::conditional_t<kStoresGradS, cute::SM90_U16x8_STSM_T, cute::SM90_U32x4_STSM_N>;
  // Of the scores of a chunk.
  using SmemCopyS = decltype(cute::make_tiled_copy_C(cute::Copy_Atom<StoreS, Element>{}, MmaP{}));

  static constexpr int kBytesK = kTileN * kHeadDim * int(sizeof(Element));       // of one stage
  static constexpr int kBytesQ = kTileM * kHeadDim * int(sizeof(Element));       // of one stage
  static constexpr int kBytesGradO = kTileM * kHeadDimV * int(sizeof(Element));  // of one stage

  static constexpr int kPartNumbers = kWarpgroupM * kColsQ;  // of dQ of a step

  // Whether a warp of the producer writes dQ of heads whose sums are complete (grad_q_writer.h),
  // where there is room for a part of it. The rows with modifiers have not been measured so.
  static constexpr int kBytesWithWriter =
      kStagesK * kBytesK + kTileN * kHeadDimV * int(sizeof(Element)) +
      kStages * (kBytesQ + kBytesGradO) + kStagesS * kTileM * kTileN * int(sizeof(Element)) +
      (kConsumers + 1) * kPartNumbers * int(sizeof(float)) +
      2 * kStages * kTileM * int(sizeof(float)) + 2048;
  static constexpr bool kCountsHeads = kKey.score_mods == score_mods::None && !kInChunks &&
                                       !kIsFewKeys<Row> &&
                                       kBytesWithWriter <= max_shared_memory(kKey.arch);

  struct SharedMemory
      : BiasBuffer<kBiasTiles && !kBiasOfWarpgroups, Element, kTileM, kTileN, kStages>,
        WarpgroupBiasBuffers<kBiasOfWarpgroups, Element, kTileM, kBiasCols, kConsumers> {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutK>, 1024> k;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutV>, 1024> v;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutQ>, 1024> q;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutGradO>, 1024> grad_o;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutSt>, 1024> grad_s;
    alignas(128) float grad_q[kConsumers][kPartNumbers];  // dQ of a step, as it is summed
    alignas(128) float lse[kStages][kTileM];
    alignas(128) float delta[kStages][kTileM];

    BackwardWork works[kWorkSlots];
    BackwardStage<kKey.score_mods, kTileM> stages[kStages];
    // Of the steps whose dQ is not written yet: read one step after the stage is released. The load
    // warp is never so far ahead that it overwrites one of them.
    StepTile step_tiles[2 * kStages];

    // Full: the load warp arrives with the bytes to come. Empty: each consumer warp arrives when
    // its MMAs have read.
    uint64_t work_full[kWorkSlots];   // 1 arrival
    uint64_t work_empty[kWorkSlots];  // kConsumers * (kWarpgroupWarps + 1) arrivals, or 1 more
    uint64_t key_full[kStagesK];      // 1 arrival; where blocks overlap query_full tells of K
    uint64_t key_empty[kStagesK];     // kConsumers * kWarpgroupWarps arrivals
    uint64_t value_full;              // 1 arrival; where blocks overlap grad_o_full tells of V
    uint64_t value_empty;             // kConsumers * kWarpgroupWarps arrivals
    uint64_t query_full[kStages];     // Q and the LSE: 2 arrivals
    uint64_t query_empty[kStages];    // kConsumers * kWarpgroupWarps arrivals
    uint64_t grad_o_full[kStages];    // dO and delta: 2 arrivals
    uint64_t grad_o_empty[kStages];   // kConsumers * kWarpgroupWarps arrivals
    uint64_t grad_s_full[kStagesS];   // dS of all keys: kConsumers * kWarpgroupWarps arrivals
    // Its dQ is computed: kConsumers * kWarpgroupWarps arrivals. Where it is stored, 1 more.
    uint64_t grad_s_empty[kStagesS];
    uint64_t grad_q_full[kConsumers];   // a warpgroup's part of dQ: kWarpgroupWarps arrivals
    uint64_t grad_q_empty[kConsumers];  // it has been read: 1 arrival
    uint64_t adder_turn[kConsumers];    // in a fixed order: a warp may take the next dQ: 1 arrival
    uint64_t landed;  // a tile that the load warp has to mend before it is full: 1 arrival
    WarpgroupBiasBarriers<kBiasOfWarpgroups, kConsumers> bias_barriers;
    // Last, so that the addresses of all else are those of rows without it.
    WriterMemory<kCountsHeads, kPartNumbers, kConsumers> writer;
  };
  static_assert(kCtasOfSm * (sizeof(SharedMemory) + 1024) <= max_shared_memory(kKey.arch) + 1024,
                "shared memory of the CTAs of an SM, of each of which CUDA keeps 1 KB for itself");
};

}  // namespace cute_attention::sm90
