// sm90_backward.h: describes the layouts of the sm90 backward kernel. It takes them from the
// traits, and pairs copies and layouts as the kernel does.
#pragma once

#include "layouts/boxes.h"
#include "layouts/descriptors.h"

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/global_sum.h"
#include "cute_attention/sm90/backward_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm90Backward {
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kColsQ = Traits::kColsQ;
  static constexpr int kWarpgroupM = sm90::kWarpgroupM;
  static constexpr int kWarpgroupThreads = sm90::kWarpgroupThreads;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using MmaS = typename Traits::MmaS;
  using MmaV = typename Traits::MmaV;
  using MmaK = typename Traits::MmaK;
  using MmaQ = typename Traits::MmaQ;
  using Scores = AccumulatorLayout<MmaS, kTileN, kTileM>;
  using GradQ = AccumulatorLayout<MmaQ, kWarpgroupM, kColsQ>;

  // The first stage of each buffer.
  using TileK = RowsOfGroups<typename Traits::SmemLayoutK, 1>;
  using TileV = RowsOfGroups<typename Traits::SmemLayoutV, 1>;
  using TileQ = RowsOfGroups<typename Traits::SmemLayoutQ, 1>;
  using TileGradO = RowsOfGroups<typename Traits::SmemLayoutGradO, 1>;
  using TileSt = RowsOfGroups<typename Traits::SmemLayoutSt, 1>;

  static Json plan() {
    static SharedMemory const plan{};
    constexpr int kAlignmentQK = swizzle_alignment<typename Traits::SmemLayoutK>();
    constexpr int kAlignmentV = swizzle_alignment<typename Traits::SmemLayoutV>();
    constexpr int kAlignmentS = swizzle_alignment<typename Traits::SmemLayoutSt>();
    constexpr int kPair = 2 * int(sizeof(float));  // a thread reads two numbers at once
    return Json::object()
        .set("phases", json_array({"all steps"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers", Json::array()
                            .add(buffer_json("k", plan, plan.k, kAlignmentQK, 0, 0))
                            .add(buffer_json("v", plan, plan.v, kAlignmentV, 0, 0))
                            .add(buffer_json("q", plan, plan.q, kAlignmentQK, 0, 0))
                            .add(buffer_json("grad_o", plan, plan.grad_o, kAlignmentV, 0, 0))
                            .add(buffer_json("grad_s", plan, plan.grad_s, kAlignmentS, 0, 0))
                            .add(buffer_json("grad_q", plan, plan.grad_q, kBytesOfVector, 0, 0))
                            .add(buffer_json("lse", plan, plan.lse, kPair, 0, 0))
                            .add(buffer_json("delta", plan, plan.delta, kPair, 0, 0)));
  }

  static Json copies() {
    using LayoutRow = typename Traits::SmemLayoutRow;
    return Json::array()
        .add(boxes_json<TileK, sm90::TmaBoxes<kTileN, kHeadDim>>("k"))
        .add(boxes_json<TileV, sm90::TmaBoxes<kTileN, kHeadDimV>>("v"))
        .add(boxes_json<TileQ, sm90::TmaBoxes<kTileM, kHeadDim>>("q"))
        .add(boxes_json<TileGradO, sm90::TmaBoxes<kTileM, kHeadDimV>>("grad_o"))
        .add(row_numbers_json<LayoutRow>("lse", "S"))
        .add(row_numbers_json<LayoutRow>("delta", "dP"))
        .add(matrix_store_json<typename Traits::SmemCopyS, TileSt, Scores>("grad_s", "dP"))
        .add(staged_sums_json());
  }

  // dQ of a step, which each warpgroup hands to the warp that adds it to the sums in global memory.
  // The warp adds a warpgroup's numbers in the order in which they lie. For each thread it says to
  // which vector of the buffer each vector of its accumulator goes.
  static Json staged_sums_json() {
    constexpr int kVectorsOfPart = int(sizeof(SharedMemory::grad_q[0])) / kBytesOfVector;
    constexpr int kVectorsOfThread = cute::size_v<GradQ> / kNumbersOfVector;
    Json vectors = Json::array();
    for (int thread = 0; thread < kConsumers * kWarpgroupThreads; ++thread) {
      int const part = thread / kWarpgroupThreads;
      int const lane = thread % kWarpgroupThreads;
      Json own = Json::array();
      for (int v = 0; v < kVectorsOfThread; ++v) {
        own.add(part * kVectorsOfPart + vector_in_block<kWarpgroupThreads>(v, lane));
      }
      vectors.add(own);
    }
    return Json::object()
        .set("kind", "staged")
        .set("tensor", "grad_q")
        .set("accumulator", "dQ")
        .set("numbers", kNumbersOfVector)
        .set("vectors", vectors);
  }

  static Json products() {
    using namespace cute;
    auto const sK = tensor_at_zero<Element, typename Traits::SmemLayoutK>();       // (N, D, 1)
    auto const sV = tensor_at_zero<Element, typename Traits::SmemLayoutV>();       // (N, DV, 1)
    auto const sQ = tensor_at_zero<Element, typename Traits::SmemLayoutQ>();       // (M, D, STAGE)
    auto const sdO = tensor_at_zero<Element, typename Traits::SmemLayoutGradO>();  // (M, DV, STAGE)
    auto const sQt = tensor_at_zero<Element, typename Traits::SmemLayoutQt>();     // (D, M, STAGE)
    using LayoutGradOt = typename Traits::SmemLayoutGradOt;
    auto const sdOt = tensor_at_zero<Element, LayoutGradOt>();  // (DV, M, STAGE)
    auto const scores = accumulator_json<MmaS, kTileN, kTileM>();
    Json const all = json_array({origin_json(0, 0)});
    return Json::array()
        .add(wgmma_product_json<MmaS>("S", "S^T = K Q^T", kTileN, kTileM, kHeadDim,
                                      keys_json("k", sK), operand_b_json<MmaS>("q", false, sQ),
                                      scores, all))
        .add(wgmma_product_json<MmaS>("dP", "dP^T = V dO^T", kTileN, kTileM, kHeadDimV,
                                      keys_json("v", sV),
                                      operand_b_json<MmaS>("grad_o", false, sdO), scores, all))
        .add(wgmma_product_json<MmaV>("dV", "dV += P^T dO", kTileN, kHeadDimV, kTileM,
                                      scores_operand_json("S"),
                                      operand_b_json<MmaV>("grad_o", true, sdOt),
                                      accumulator_json<MmaV, kTileN, kHeadDimV>(), all))
        .add(wgmma_product_json<MmaK>(
            "dK", "dK += dS^T Q", kTileN, kHeadDim, kTileM, scores_operand_json("dP"),
            operand_b_json<MmaK>("q", true, sQt), accumulator_json<MmaK, kTileN, kHeadDim>(), all))
        .add(grad_q_json());
  }

  // K or V as the operand A of a product for scores. The tiled MMA gives each warpgroup 64 keys.
  template <class Tensor>
  static Json keys_json(char const* tensor, Tensor const& keys) {
    using namespace cute;
    return descriptors_json(tensor, false, "k", kWarpgroupM, kConsumers, [&](int warpgroup) {
      auto const thread_mma = MmaS{}.get_slice(warpgroup * kWarpgroupThreads);
      return thread_mma.partition_fragment_A(keys)(_, _, _, 0);
    });
  }

  // An operand B that all warpgroups have in common.
  template <class Mma, class Tensor>
  static Json operand_b_json(char const* name, bool transposed, Tensor const& tensor) {
    using namespace cute;
    return descriptors_json(name, transposed, transposed ? "mn" : "k", kWgmmaN<Mma>, 1, [&](int) {
      return Mma{}.get_slice(0).partition_fragment_B(tensor)(_, _, _, 0);
    });
  }

  // P^T or dS^T as the operand A of a product: what was an accumulator of scores.
  static Json scores_operand_json(char const* accumulator) {
    return register_operand_json<decltype(as_a_operand(Scores{}))>(accumulator);
  }

  // dQ = dS K, of which each warpgroup computes a part. It is late: each step computes dQ of the
  // step before. The first step of a block of keys computes a dQ that nobody uses, and the last dQ
  // comes after all steps of the block.
  static Json grad_q_json() {
    using namespace cute;
    auto const sdS = tensor_at_zero<Element, typename Traits::SmemLayoutS>();   // (M, N, STAGE)
    auto const sKt = tensor_at_zero<Element, typename Traits::SmemLayoutKt>();  // (D, N, 1)
    auto const grad_s =
        descriptors_json("grad_s", true, "mn", kWarpgroupM, kConsumers, [&](int warpgroup) {
          auto const part =
              local_tile(sdS, Shape<Int<kWarpgroupM>, Int<kTileN>>{},
                         make_coord(Traits::row_part_q(warpgroup), _0{}, 0));  // (64, N)
          return MmaQ{}.get_slice(0).partition_fragment_A(part);
        });
    auto const k = descriptors_json("k", true, "mn", kWgmmaN<MmaQ>, kConsumers, [&](int warpgroup) {
      auto const part =
          local_tile(sKt, Shape<Int<kColsQ>, Int<kTileN>>{},
                     make_coord(Traits::col_part_q(warpgroup), _0{}, _0{}));  // (COLS_Q, N)
      return MmaQ{}.get_slice(0).partition_fragment_B(part);
    });
    Json origins = Json::array();
    for (int warpgroup = 0; warpgroup < kConsumers; ++warpgroup) {
      origins.add(origin_json(Traits::row_part_q(warpgroup) * kWarpgroupM,
                              Traits::col_part_q(warpgroup) * kColsQ));
    }
    return wgmma_product_json<MmaQ>("dQ", "dQ = dS K", kTileM, kHeadDim, kTileN, grad_s, k,
                                    accumulator_json<MmaQ, kWarpgroupM, kColsQ>(), origins)
        .set("late", true);
  }

  static Json roles() {
    constexpr int kIdleThreads = kWarpgroupThreads - 32 - 32 * kConsumers;
    auto const role_of_producer = [](char const* name, int threads) {
      return role_json(name, threads, Traits::Registers::kProducer, true, Json::array());
    };
    Json roles = Json::array();
    roles.add(role_of_producer("load", 32)).add(role_of_producer("add dQ", 32 * kConsumers));
    if (kIdleThreads > 0) {
      roles.add(role_of_producer("idle", kIdleThreads));
    }
    return roles.add(role_json("consumers", kConsumers * kWarpgroupThreads,
                               Traits::Registers::kConsumer, true, together()));
  }

  // With kGradQFirst dQ is computed while the scores are still accumulators.
  static Json together() {
    if constexpr (Traits::kGradQFirst) {
      return json_array({json_array({"dV", "dK", "S", "dP", "dQ"}),
                         json_array({"dK", "dP", "dQ", "dV"}), json_array({"dV", "dQ", "dK"})});
    } else {
      return json_array({json_array({"dV", "dK", "S", "dP"}), json_array({"dK", "dP", "dV"}),
                         json_array({"dV", "dK", "dQ"}), json_array({"dV", "dQ", "dK"})});
    }
  }

  // dQ is staged in vectors of four floats.
  static constexpr int kNumbersOfVector = 4;
  static constexpr int kBytesOfVector = kNumbersOfVector * int(sizeof(float));
};

}  // namespace cute_attention::layouts
