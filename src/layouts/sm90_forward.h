// sm90_forward.h: describes the layouts of the sm90 forward kernel. It takes them from the traits,
// and pairs copies and layouts as the kernel does.
#pragma once

#include "layouts/descriptors.h"

#include "cute_attention/core/accumulator.h"
#include "cute_attention/sm90/forward_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm90Forward {
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

  // The first stage of each buffer. That of Q has the tiles of all warpgroups: (64 x WARPGROUP, D).
  using TileQ = RowsOfGroups<typename Traits::SmemLayoutQ, kConsumers>;
  using TileK = RowsOfGroups<typename Traits::SmemLayoutK, 1>;
  using TileV = RowsOfGroups<typename Traits::SmemLayoutV, 1>;

  static Json plan() {
    static SharedMemory const plan{};
    constexpr int kAlignmentQK = swizzle_alignment<typename Traits::SmemLayoutQ>();
    constexpr int kAlignmentV = swizzle_alignment<typename Traits::SmemLayoutV>();
    return Json::object()
        .set("phases", json_array({"all tiles"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers", Json::array()
                            .add(buffer_json("q", plan, plan.q, kAlignmentQK, 0, 0))
                            .add(buffer_json("k", plan, plan.k, kAlignmentQK, 0, 0))
                            .add(buffer_json("v", plan, plan.v, kAlignmentV, 0, 0))
                            .add(buffer_json("tiles", plan, plan.tiles, 8, 0, 0)));
  }

  // The TMA boxes of `groups` tiles that lie one below the other.
  template <class Tile, class Boxes>
  static Json boxes_json(char const* tensor, int groups) {
    Json boxes = Json::array();
    for (int group = 0; group < groups; ++group) {
      for (int box = 0; box < Boxes::kCount; ++box) {
        boxes.add(Json::object()
                      .set("row", group * Boxes::kRows)
                      .set("col", Boxes::col(box))
                      .set("address", Boxes::offset(group * Boxes::kCount + box)));
      }
    }
    return Json::object()
        .set("kind", "boxes")
        .set("tensor", tensor)
        .set("rows", groups * Boxes::kRows)
        .set("box", Json::array().add(Boxes::kRows).add(Boxes::kCols))
        .set("swizzle_bits", Boxes::kSwizzleBits)
        .set("boxes", boxes)
        .set("smem", smem_json<Tile>(tensor));
  }

  static Json copies() {
    return Json::array()
        .add(boxes_json<TileQ, sm90::TmaBoxes<kWarpgroupM, kHeadDim>>("q", kConsumers))
        .add(boxes_json<TileK, sm90::TmaBoxes<kTileN, kHeadDim>>("k", 1))
        .add(boxes_json<TileV, sm90::TmaBoxes<kTileN, kHeadDimV>>("v", 1));
  }

  static Json products() {
    using namespace cute;
    auto* const memory = reinterpret_cast<Element*>(shared_memory_window);
    auto const tensor = [&](auto layout) { return make_tensor(make_smem_ptr(memory), layout); };
    MmaQK const mma_qk;
    MmaPV const mma_pv;
    auto const q = descriptors_json(
        "q", false, "k", kWarpgroupM, kConsumers,
        mma_qk.get_slice(0).partition_fragment_A(tensor(typename Traits::SmemLayoutQ{})));
    auto const k = descriptors_json(
        "k", false, "k", size<1>(typename MmaQK::AtomShape_MNK{}), 1,
        mma_qk.get_slice(0).partition_fragment_B(tensor(typename Traits::SmemLayoutK{})));
    auto const v = descriptors_json(
        "v", true, "mn", size<1>(typename MmaPV::AtomShape_MNK{}), 1,
        mma_pv.get_slice(0).partition_fragment_B(tensor(typename Traits::SmemLayoutVt{})));
    auto const p = register_operand_json<decltype(as_a_operand(Scores{}))>("S");
    return Json::array()
        .add(product<MmaQK>("S", "S = Q K^T", kTileN, kHeadDim, q, k,
                            accumulator_json<MmaQK, kWarpgroupM, kTileN>()))
        .add(product<MmaPV>("O", "O += P V", kHeadDimV, kTileN, p, v,
                            accumulator_json<MmaPV, kWarpgroupM, kHeadDimV>()));
  }

  template <class Mma>
  static Json product(char const* name, char const* formula, int n, int k, Json const& a,
                      Json const& b, Json const& c) {
    int const atom_n = cute::size<1>(typename Mma::AtomShape_MNK{});
    std::string const instruction = "wgmma.m64n" + std::to_string(atom_n) + "k16";
    return product_json(name, formula, instruction.c_str(), kTileM, n, k, a, b, c, kConsumers);
  }

  static Json roles() {
    return Json::array()
        .add(role_json("producer", sm90::kWarpgroupThreads, Traits::kProducerRegisters, true,
                       Json::array()))
        .add(role_json("consumers", kConsumers * sm90::kWarpgroupThreads,
                       Traits::kConsumerRegisters, true, json_array({json_array({"S", "O"})})));
  }
};

}  // namespace cute_attention::layouts
