// sm90_grad_q.h: describes the layouts of the sm90 kernel that computes dQ where another kernel
// computes dK and dV. It takes them from the traits, and pairs copies and layouts as the kernel
// does.
#pragma once

#include "layouts/boxes.h"
#include "layouts/descriptors.h"
#include "layouts/sm90_grad_kv.h"

#include "cute_attention/sm90/grad_q_traits.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm90GradQ {
  static constexpr char const* kName = "grad_q";
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kWarpgroupM = sm90::kWarpgroupM;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using MmaS = typename Traits::MmaS;
  using MmaP = typename Traits::MmaP;
  using MmaQ = typename Traits::MmaQ;
  using Scores = AccumulatorLayout<MmaS, kWarpgroupM, kTileN>;
  using ScoresP = AccumulatorLayout<MmaP, kWarpgroupM, kTileN>;

  // The first stage of each buffer. Those of Q and dO have the tiles of all warpgroups:
  // (64 x WARPGROUP, D).
  using TileQ = RowsOfGroups<typename Traits::SmemLayoutQ, kConsumers>;
  using TileGradO = RowsOfGroups<typename Traits::SmemLayoutGradO, kConsumers>;
  using TileK = RowsOfGroups<typename Traits::SmemLayoutK, 1>;
  using TileV = RowsOfGroups<typename Traits::SmemLayoutV, 1>;

  static Json plan() {
    static SharedMemory const plan{};
    constexpr int kAlignmentQ = swizzle_alignment<typename Traits::SmemLayoutQ>();
    constexpr int kAlignmentGradO = swizzle_alignment<typename Traits::SmemLayoutGradO>();
    constexpr int kAlignmentK = swizzle_alignment<typename Traits::SmemLayoutK>();
    constexpr int kAlignmentV = swizzle_alignment<typename Traits::SmemLayoutV>();
    return Json::object()
        .set("phases", json_array({"all steps"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers", Json::array()
                            .add(buffer_json("q", plan, plan.q, kAlignmentQ, 0, 0))
                            .add(buffer_json("grad_o", plan, plan.grad_o, kAlignmentGradO, 0, 0))
                            .add(buffer_json("k", plan, plan.k, kAlignmentK, 0, 0))
                            .add(buffer_json("v", plan, plan.v, kAlignmentV, 0, 0)));
  }

  // The tensor maps are those of the kernel for dK and dV, which the host makes once for both
  // kernels.
  using Maps = Sm90GradKv<sm90::GradKvTraits<typename Traits::OfRow>>;

  static Json copies() {
    using BoxesQ = sm90::TmaBoxes<kWarpgroupM, kHeadDim, Traits::kBox>;
    using BoxesGradO = sm90::TmaBoxes<kWarpgroupM, kHeadDimV, Traits::kBoxV>;
    using BoxesK = sm90::TmaBoxes<kTileN, kHeadDim, Traits::kBox>;
    using BoxesV = sm90::TmaBoxes<kTileN, kHeadDimV, Traits::kBoxV>;
    return Json::array()
        .add(boxes_json<TileQ, BoxesQ, typename Maps::BoxesQ>("q", kConsumers))
        .add(boxes_json<TileGradO, BoxesGradO, typename Maps::BoxesGradO>("grad_o", kConsumers))
        .add(boxes_json<TileK, BoxesK, typename Maps::BoxesK>("k"))
        .add(boxes_json<TileV, BoxesV, typename Maps::BoxesV>("v"))
        .add(held_numbers_json<Scores>("lse", "S"))
        .add(held_numbers_json<ScoresP>("delta", "dP"));
  }

  // The LSE or delta of the rows that each thread has in an accumulator, in registers. Lists for
  // each thread the rows whose numbers it loads from global memory. `registers` (ROWS, COLS) says
  // which registers of the accumulator the kernel takes for the scores of each.
  template <class Accumulator>
  static Json held_numbers_json(char const* tensor, char const* accumulator) {
    using Rows = decltype(rows_and_columns(Accumulator{}));
    Json rows = Json::array();
    for (int thread = 0; thread < kConsumers * sm90::kWarpgroupThreads; ++thread) {
      int const first = thread / sm90::kWarpgroupThreads * kWarpgroupM +
                        sm90::row_of_thread(thread % sm90::kWarpgroupThreads);
      rows.add(json_array({first, first + 8}));
    }
    return Json::object()
        .set("kind", "held")
        .set("tensor", tensor)
        .set("accumulator", accumulator)
        .set("rows", rows)
        .set("registers", layout_json<Rows>());
  }

  static Json products() {
    using namespace cute;
    auto const sQ = tensor_at_zero<Element, typename Traits::SmemLayoutQ>();  // (64, D, WARPGROUP)
    auto const sdO =
        tensor_at_zero<Element, typename Traits::SmemLayoutGradO>();          // (64, DV, WARPGROUP)
    auto const sK = tensor_at_zero<Element, typename Traits::SmemLayoutK>();  // (N, D, STAGE)
    auto const sKt = tensor_at_zero<Element, typename Traits::SmemLayoutKt>();  // (D, N, STAGE)
    auto const sV = tensor_at_zero<Element, typename Traits::SmemLayoutV>();    // (N, DV, STAGE)
    auto const origins = origins_below_each_other(kConsumers);
    return Json::array()
        .add(wgmma_product_json<MmaS>("S", "S = Q K^T", kTileM, kTileN, kHeadDim,
                                      operand_a_of_each_json<MmaS>("q", sQ, kConsumers),
                                      operand_b_json<MmaS>("k", false, sK),
                                      accumulator_json<MmaS, kWarpgroupM, kTileN>(), origins))
        .add(wgmma_product_json<MmaP>("dP", "dP = dO V^T", kTileM, kTileN, kHeadDimV,
                                      operand_a_of_each_json<MmaP>("grad_o", sdO, kConsumers),
                                      operand_b_json<MmaP>("v", false, sV),
                                      accumulator_json<MmaP, kWarpgroupM, kTileN>(), origins))
        .add(wgmma_product_json<MmaQ>("dQ", "dQ += dS K", kTileM, kHeadDim, kTileN,
                                      scores_operand_json<ScoresP>("dP"),
                                      operand_b_json<MmaQ>("k", true, sKt),
                                      accumulator_json<MmaQ, kWarpgroupM, kHeadDim>(), origins));
  }

  // S of a step is started while dQ of the step before is under way, whose operand is in registers.
  static Json roles() {
    return Json::array()
        .add(producer_role_json<Traits>("load", 32))
        .add(producer_role_json<Traits>("idle", sm90::kWarpgroupThreads - 32))
        .add(role_json("consumers", kConsumers * sm90::kWarpgroupThreads,
                       Traits::Registers::kConsumer, true,
                       json_array({json_array({"S", "dQ"}), json_array({"dQ", "S", "dP"})})));
  }
};

}  // namespace cute_attention::layouts
