// sm90_mla.h: describes the layouts of the sm90 forward kernel for rows with qv. It takes them from
// the traits, and pairs copies and layouts as the kernel does.
//
// A tile of queries has the columns of qv and then those of q, a tile of keys those of v and then
// those of k. The kernel copies and multiplies them part by part.
#pragma once

#include "layouts/boxes.h"
#include "layouts/descriptors.h"

#include "cute_attention/sm90/mla_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm90Mla {
  static constexpr char const* kName = "";
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kCols = Traits::kCols;
  static constexpr int kHalf = Traits::kHalf;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using MmaQK = typename Traits::MmaQK;
  using MmaPV = typename Traits::MmaPV;
  using Scores = AccumulatorLayout<MmaQK, kTileM, kTileN>;
  static_assert(Traits::kBox == Traits::kBoxV, "all columns of a tile have boxes of one width");

  // All parts of a tile, and the first stage of one.
  using TileQ = RowsOfGroups<sm90::SmemTiles<Element, kTileM, kCols, 1, Traits::kBox>, 1>;
  using TileKv = RowsOfGroups<sm90::SmemTiles<Element, kTileN, kCols, 1, Traits::kBox>, 1>;

  static Json plan() {
    static SharedMemory const plan{};
    constexpr int kAlignment = swizzle_alignment<TileQ>();
    constexpr int kVector = 16;
    return Json::object()
        .set("phases", json_array({"all tiles"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers", Json::array()
                            .add(buffer_json("q", plan, plan.q, kAlignment, 0, 0))
                            .add(buffer_json("kv", plan, plan.kv, kAlignment, 0, 0))
                            .add(buffer_json("exchange", plan, plan.exchange, kVector, 0, 0))
                            .add(buffer_json("tiles", plan, plan.tiles, 8, 0, 0)));
  }

  static Json copies() {
    return Json::array()
        .add(boxes_json<TileQ, sm90::TmaBoxes<kTileM, kCols, Traits::kBox>>("q"))
        .add(boxes_json<TileKv, sm90::TmaBoxes<kTileN, kCols, Traits::kBox>>("kv"));
  }

  static Json products() {
    auto const whole = json_array({origin_json(0, 0)});
    auto const halves = json_array({origin_json(0, 0), origin_json(0, kHalf)});
    auto const scores = Json::object()
                            .set("name", "S")
                            .set("formula", "S = Q K^T")
                            .set("instruction", "wgmma.m64n" + std::to_string(kTileN) + "k16")
                            .set("tile", json_array({kTileM, kTileN, kCols}))
                            .set("origins", whole)
                            .set("parts", json_array({scores_part_json<sm90::kRope>(),
                                                      scores_part_json<sm90::kLeft>(),
                                                      scores_part_json<sm90::kRight>()}))
                            .set("c", accumulator_json<MmaQK, kTileM, kTileN>());
    return Json::array().add(scores).add(wgmma_product_json<MmaPV>(
        "O", "O += P V", kTileM, kHeadDimV, kTileN, scores_operand_json<Scores>("S"), values_json(),
        accumulator_json<MmaPV, kTileM, kHalf>(), halves));
  }

  // The operands of S that a part of the columns has.
  template <sm90::Part kPart>
  static Json scores_part_json() {
    using namespace cute;
    auto const sQ = part_at<typename Traits::template SmemLayoutQ<kPart>>(
        Traits::offset_q(kPart));  // (M, COLS, 1)
    auto const sK = part_at<typename Traits::template SmemLayoutK<kPart>>(
        Traits::offset_kv(0, kPart));  // (N, COLS, 1)
    return Json::object()
        .set("a", operand_a_of_each_json<MmaQK>("q", sQ, 1))
        .set("b", operand_b_json<MmaQK>("kv", false, sK));
  }

  // The half of V^T that each warpgroup multiplies.
  static Json values_json() {
    using namespace cute;
    return descriptors_json("kv", true, "mn", kWgmmaN<MmaPV>, Traits::kConsumers, [](int half) {
      auto const sVt =
          part_at<typename Traits::SmemLayoutVt>(Traits::offset_kv(0, half));  // (HALF, N, 1)
      return MmaPV{}.get_slice(0).partition_fragment_B(sVt)(_, _, _, 0);
    });
  }

  // A tensor that begins so many elements after address 0.
  template <class Layout>
  static auto part_at(int offset) {
    auto* const memory = reinterpret_cast<Element*>(shared_memory_window) + offset;
    return cute::make_tensor(cute::make_smem_ptr(memory), Layout{});
  }

  static Json roles() {
    auto const consumer = [](char const* name, Json const& together) {
      return role_json(name, sm90::kWarpgroupThreads, Traits::Registers::kConsumer, true, together);
    };
    return Json::array()
        .add(role_json("producer", sm90::kWarpgroupThreads, Traits::Registers::kProducer, true,
                       Json::array()))
        .add(consumer("left half", json_array({json_array({"S", "O"})})))
        .add(consumer("right half", json_array({json_array({"O"})})));
  }
};

}  // namespace cute_attention::layouts
