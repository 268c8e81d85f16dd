// sm90_forward.h: describes the layouts of the sm90 forward kernel. It takes them from the traits,
// and pairs copies and layouts as the kernel does.
#pragma once

#include "layouts/bias_tiles.h"
#include "layouts/boxes.h"
#include "layouts/descriptors.h"
#include "layouts/sm90_mla.h"

#include "cute_attention/sm90/forward_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm90Forward {
  static constexpr char const* kName = "";
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kWarpgroupM = sm90::kWarpgroupM;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using MmaQK = typename Traits::MmaQK;
  using MmaPV = typename Traits::MmaPV;
  using Scores = AccumulatorLayout<MmaQK, kWarpgroupM, kTileN>;
  using Output = AccumulatorLayout<MmaPV, kWarpgroupM, kHeadDimV>;

  // The first stage of each buffer. That of Q has the tiles of all warpgroups: (64 x WARPGROUP, D).
  using TileQ = RowsOfGroups<typename Traits::SmemLayoutQ, kConsumers>;
  using TileK = RowsOfGroups<typename Traits::SmemLayoutK, 1>;
  using TileV = RowsOfGroups<typename Traits::SmemLayoutV, 1>;
  using TileO = RowsOfGroups<typename Traits::SmemLayoutO, kConsumers>;
  // The copies that warpgroups make of O, each of its rows, as one copy.
  using SmemCopyO = decltype(cute::make_tiled_copy_C(
      cute::Copy_Atom<cute::SM90_U32x4_STSM_N, Element>{},
      cute::make_tiled_mma(
          typename MmaPV::Atom{},
          cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>{})));

  static Json plan() {
    static SharedMemory const plan{};
    constexpr int kAlignmentQK = swizzle_alignment<typename Traits::SmemLayoutQ>();
    constexpr int kAlignmentV = swizzle_alignment<typename Traits::SmemLayoutV>();
    return Json::object()
        .set("phases", json_array({"all tiles"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers",
             with_output_buffer(
                 with_places_buffer(with_bias_buffer<Traits>(
                                        Json::array()
                                            .add(buffer_json("q", plan, plan.q, kAlignmentQK, 0, 0))
                                            .add(buffer_json("k", plan, plan.k, kAlignmentQK, 0, 0))
                                            .add(buffer_json("v", plan, plan.v, kAlignmentV, 0, 0))
                                            .add(buffer_json("tiles", plan, plan.tiles, 8, 0, 0)),
                                        plan),
                                    plan),
                 plan));
  }
  // O on its way to global memory, if TMA stores it.
  static Json with_output_buffer(Json buffers, SharedMemory const& plan) {
    if constexpr (Traits::kStoresBoxes) {
      constexpr int kAlignment = swizzle_alignment<typename Traits::SmemLayoutO>();
      buffers.add(buffer_json("o", plan, plan.o, kAlignment, 0, 0));
    }
    return buffers;
  }
  // The places of keys that the tensor cores multiply slopes with, if the kernel has them.
  static Json with_places_buffer(Json buffers, SharedMemory const& plan) {
    if constexpr (Traits::kAlibiProduct) {
      constexpr int kAlignment = swizzle_alignment<typename SharedMemory::SmemLayoutPlaces>();
      buffers.add(buffer_json("places", plan, plan.places, kAlignment, 0, 0));
    }
    return buffers;
  }

  static Json copies() {
    Json copies = with_bias_boxes<Traits>(
        Json::array()
            .add(boxes_json<TileQ, sm90::TmaBoxes<kWarpgroupM, kHeadDim, Traits::kBox>>("q",
                                                                                        kConsumers))
            .add(boxes_json<TileK, sm90::TmaBoxes<kTileN, kHeadDim, Traits::kBox>>("k"))
            .add(boxes_json<TileV, sm90::TmaBoxes<kTileN, kHeadDimV, Traits::kBoxV>>("v")));
    if constexpr (Traits::kStoresBoxes) {
      using Boxes = sm90::TmaBoxes<kWarpgroupM, kHeadDimV, Traits::kBoxV>;
      copies.add(matrix_store_json<SmemCopyO, TileO, Output>("o", "O"))
          .add(stored_boxes_json<TileO, Boxes, sm90::kWarpM>("o", kConsumers));
    }
    return copies;
  }

  static Json products() {
    using namespace cute;
    auto const sQ = tensor_at_zero<Element, typename Traits::SmemLayoutQ>();  // (64, D, WARPGROUP)
    auto const sK = tensor_at_zero<Element, typename Traits::SmemLayoutK>();  // (N, D, STAGE)
    auto const sVt = tensor_at_zero<Element, typename Traits::SmemLayoutVt>();  // (DV, N, STAGE)
    auto const origins = origins_below_each_other(kConsumers);
    return Json::array()
        .add(wgmma_product_json<MmaQK>("S", "S = Q K^T", kTileM, kTileN, kHeadDim,
                                       operand_a_of_each_json<MmaQK>("q", sQ, kConsumers),
                                       operand_b_json<MmaQK>("k", false, sK),
                                       accumulator_json<MmaQK, kWarpgroupM, kTileN>(), origins))
        .add(wgmma_product_json<MmaPV>("O", "O += P V", kTileM, kHeadDimV, kTileN,
                                       scores_operand_json<Scores>("S"),
                                       operand_b_json<MmaPV>("v", true, sVt),
                                       accumulator_json<MmaPV, kWarpgroupM, kHeadDimV>(), origins));
  }

  static Json roles() {
    return Json::array()
        .add(role_json("producer", sm90::kWarpgroupThreads, Traits::Registers::kProducer, true,
                       Json::array()))
        .add(role_json("consumers", kConsumers * sm90::kWarpgroupThreads,
                       Traits::Registers::kConsumer, true, json_array({json_array({"S", "O"})})));
  }
};

template <class Row>
using Sm90ForwardKernels =
    std::conditional_t<has_qv(Row::kKey.score_mods), Kernels<Sm90Mla<sm90::MlaTraits<Row>>>,
                       Kernels<Sm90Forward<sm90::ForwardTraits<Row>>>>;

}  // namespace cute_attention::layouts
