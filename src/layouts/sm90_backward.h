// sm90_backward.h: describes the kernels of a row of the sm90 backward: one kernel that computes
// all gradients, or one for dK and dV and another for dQ. The description of the first is here.
#pragma once

#include <type_traits>

#include "layouts/bias_tiles.h"
#include "layouts/boxes.h"
#include "layouts/descriptors.h"
#include "layouts/sm90_grad_kv.h"
#include "layouts/sm90_grad_q.h"
#include "layouts/sm90_key_gradients.h"

#include "cute_attention/core/global_sum.h"
#include "cute_attention/sm90/backward_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm90Backward : Sm90KeyGradients<Traits, typename Traits::MmaP, Traits::kInChunks> {
  static constexpr char const* kName = "";
  using Base = Sm90KeyGradients<Traits, typename Traits::MmaP, Traits::kInChunks>;
  using Base::kHeadDim;
  using Base::kTileM;
  using Base::kTileN;
  using typename Base::Element;
  using typename Base::ScoresP;
  static constexpr int kConsumers = Traits::kConsumers;
  static constexpr int kColsQ = Traits::kColsQ;
  static constexpr int kWarpgroupM = sm90::kWarpgroupM;
  static constexpr int kWarpgroupThreads = sm90::kWarpgroupThreads;
  using SharedMemory = typename Traits::SharedMemory;
  using MmaQ = typename Traits::MmaQ;
  using GradQ = AccumulatorLayout<MmaQ, kWarpgroupM, kColsQ>;
  using TileSt = RowsOfGroups<typename Traits::SmemLayoutSt, 1>;  // of the first stage

  static Json plan() {
    static SharedMemory const plan{};
    constexpr int kAlignmentS = swizzle_alignment<typename Traits::SmemLayoutSt>();
    return Json::object()
        .set("phases", json_array({"all steps"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers",
             with_bias_buffer<Traits>(
                 Json::array()
                     .add(buffer_json("k", plan, plan.k, Base::kAlignmentK, 0, 0))
                     .add(buffer_json("v", plan, plan.v, Base::kAlignmentV, 0, 0))
                     .add(buffer_json("q", plan, plan.q, Base::kAlignmentQ, 0, 0))
                     .add(buffer_json("grad_o", plan, plan.grad_o, Base::kAlignmentGradO, 0, 0))
                     .add(buffer_json("grad_s", plan, plan.grad_s, kAlignmentS, 0, 0))
                     .add(buffer_json("grad_q", plan, plan.grad_q, kBytesOfVector, 0, 0))
                     .add(buffer_json("lse", plan, plan.lse, Base::kAlignmentRow, 0, 0))
                     .add(buffer_json("delta", plan, plan.delta, Base::kAlignmentRow, 0, 0)),
                 plan));
  }

  static Json copies() {
    return with_bias_boxes<Traits>(Base::inputs())
        .add(matrix_store_json<typename Traits::SmemCopyS, TileSt, ScoresP>("grad_s", "dP"))
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

  static Json products() { return Base::score_and_key_products().add(grad_q_json()); }

  // dQ = dS K, of which each warpgroup computes a part. If it is late, each step computes dQ of the
  // step before. The first step of a block of keys computes a dQ that nobody uses, and the last dQ
  // comes after all steps of the block.
  static Json grad_q_json() {
    using namespace cute;
    auto const sdS = tensor_at_zero<Element, typename Traits::SmemLayoutS>();   // (M, N, STAGE)
    auto const sKt = tensor_at_zero<Element, typename Traits::SmemLayoutKt>();  // (D, N, 1)
    // Keys lie side by side where it may be stored as the gradient of a bias.
    auto const grad_s =
        descriptors_json("grad_s", true, Traits::kStoresGradS ? "k" : "mn", kWarpgroupM, kConsumers,
                         [&](int warpgroup) {
                           auto const part = local_tile(
                               sdS, Shape<Int<kWarpgroupM>, Int<kTileN>>{},
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
        .set("late", Traits::kGradQLag > 0);
  }

  static Json roles() {
    constexpr int kStorers = Traits::kStoresGradS ? 32 : 0;  // of dS, where it is to be stored
    constexpr int kIdleThreads = kWarpgroupThreads - 32 - 32 * kConsumers - kStorers;
    Json roles = Json::array();
    roles.add(producer_role_json<Traits>("load", 32))
        .add(producer_role_json<Traits>("add dQ", 32 * kConsumers));
    if (kStorers > 0) {
      roles.add(producer_role_json<Traits>("store dS", kStorers));
    }
    if (kIdleThreads > 0) {
      roles.add(producer_role_json<Traits>("idle", kIdleThreads));
    }
    return roles.add(role_json("consumers", kConsumers * kWarpgroupThreads,
                               Traits::Registers::kConsumer, true, together()));
  }

  // With kGradQFirst dQ is computed while the scores are still accumulators; in chunks, when there
  // are none.
  static Json together() {
    if constexpr (Traits::kInChunks) {
      return json_array({json_array({"dV", "dK", "S", "dP"}), json_array({"dV", "dK", "dQ"})});
    } else if constexpr (Traits::kGradQFirst) {
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

template <class Row>
using Sm90BackwardKernels = std::conditional_t<
    sm90::kSumsGradQ<Row>, Kernels<Sm90Backward<sm90::BackwardTraits<Row>>>,
    Kernels<Sm90GradKv<sm90::GradKvTraits<Row>>, Sm90GradQ<sm90::GradQTraits<Row>>>>;

}  // namespace cute_attention::layouts
