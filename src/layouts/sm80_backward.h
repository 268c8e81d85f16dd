// sm80_backward.h: describes the layouts of the sm80 backward kernel, and of the kernel after it
// that writes dQ. It takes them from the traits, and pairs copies and layouts as the kernels do.
#pragma once

#include <algorithm>
#include <vector>

#include "layouts/describe.h"
#include "layouts/operands.h"

#include "cute_attention/sm80/backward_operand.h"
#include "cute_attention/sm80/backward_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm80Backward {
  static constexpr char const* kName = "";
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kPartM = Traits::kPartM;
  static constexpr int kWarpsM = Traits::kWarpsM;
  static constexpr int kWarpsN = Traits::kWarpsN;
  using SharedMemory = typename Traits::SharedMemory;
  using Operands = sm80::BackwardOperands<Traits>;
  using MmaS = typename Traits::TiledMmaS;
  using MmaKV = typename Traits::TiledMmaKV;
  using MmaQ = typename Traits::TiledMmaQ;
  using LayoutK = typename Traits::SmemLayoutK;
  using LayoutV = typename Traits::SmemLayoutV;
  using LayoutP = typename Traits::SmemLayoutP;
  using Scores = AccumulatorLayout<MmaS, kTileN, kTileM>;

  static Json plan() {
    static SharedMemory const plan{};
    Json buffers = Json::array();
    buffers.add(buffer_json("k", plan, plan.k, kBankRow, 0, 0))
        .add(buffer_json("v", plan, plan.v, kBankRow, 0, 0))
        .add(buffer_json("q", plan, plan.q, kBankRow, 0, 0))
        .add(buffer_json("grad_o", plan, plan.grad_o, kBankRow, 0, 0))
        .add(buffer_json("grad_s", plan, plan.grad_s, kBankRow, 0, 0))
        .add(buffer_json("p", plan, plan.p, kBankRow, 0, 0))
        .add(buffer_json("lse", plan, plan.lse, 16, 0, 0))
        .add(buffer_json("delta", plan, plan.delta, 16, 0, 0))
        .add(buffer_json("grad_k", plan, plan.k, kBankRow, 1, 1))
        .add(buffer_json("grad_v", plan, plan.v, kBankRow, 1, 1))
        .add(buffer_json("grad_q", 0, Traits::kSmemBytesGradQ, kBankRow, 2, 2));
    return Json::object()
        .set("phases",
             json_array({"tiles of queries", "write dK, dV", "write dQ, a kernel of its own"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers", buffers);
  }

  static Json copies() {
    using GradK = AccumulatorLayout<MmaKV, kTileN, kHeadDim>;
    using GradV = AccumulatorLayout<MmaKV, kTileN, kHeadDimV>;
    using GradQ = AccumulatorLayout<MmaQ, kTileM, kHeadDim>;
    using LayoutQ = typename Traits::SmemLayoutQ;
    using LayoutRow = typename Traits::SmemLayoutRow;
    Json copies = Json::array();
    copies.add(tile_copy_json<typename Traits::GmemCopyQK, LayoutK>("k", true))
        .add(tile_copy_json<typename Traits::GmemCopyV, LayoutV>("v", true))
        .add(tile_copy_json<typename Traits::GmemCopyQK, LayoutQ>("q", true))
        .add(tile_copy_json<typename Traits::GmemCopyV, typename Traits::SmemLayoutGradO>("grad_o",
                                                                                          true))
        .add(row_numbers_json<LayoutRow>("lse", "S", "S"))
        .add(row_numbers_json<LayoutRow>("delta", "dP", "S"))
        .add(fragment_store_json<MmaS, LayoutP, Scores>("grad_s", "dP"));
    if (kWarpsM > 1) {
      copies.add(fragment_store_json<MmaS, LayoutP, Scores>("p", "S"));
    }
    return copies
        .add(placed_fragment_json<typename Operands::PlaceOfGradK, MmaKV, LayoutK, GradK>("grad_k",
                                                                                          "dK"))
        .add(tile_copy_json<typename Traits::GmemStoreQK, LayoutK>("grad_k", false))
        .add(placed_fragment_json<typename Operands::PlaceOfGradV, MmaKV, LayoutV, GradV>("grad_v",
                                                                                          "dV"))
        .add(tile_copy_json<typename Traits::GmemStoreV, LayoutV>("grad_v", false))
        .add(placed_fragment_json<typename Operands::PlaceOfGradQ, MmaQ, LayoutQ, GradQ>("grad_q",
                                                                                         "dQ"))
        .add(tile_copy_json<typename Traits::GmemStoreQK, LayoutQ>("grad_q", false));
  }

  // Some operands use the first addresses of others (sm80::BackwardAddresses): V those of K, dO
  // those of Q, and the parts of dO^T those of Q^T.
  static Json products() {
    auto const scores = accumulator_json<MmaS, kTileN, kTileM>();
    auto const k = smem_operand_json<typename Operands::K, OperandA, MmaS>("k");
    auto const q = smem_operand_json<typename Operands::Q, OperandB, MmaS>("q");
    auto const v =
        smem_operand_json<typename Operands::V, OperandA, MmaS, typename Operands::K>("v");
    auto const grad_o =
        smem_operand_json<typename Operands::GradO, OperandB, MmaS, typename Operands::Q>("grad_o");
    auto const st = smem_operand_json<typename Operands::Pt, OperandA, MmaQ>("grad_s");
    auto const kt = smem_operand_json<typename Operands::Kt, OperandB, MmaQ>("k");
    return Json::array()
        .add(product_json("S", "S^T = K Q^T", kMma, kTileN, kTileM, kHeadDim, k, q, scores))
        .add(
            product_json("dP", "dP^T = V dO^T", kMma, kTileN, kTileM, kHeadDimV, v, grad_o, scores))
        .add(key_product<typename Operands::GradOt, typename Traits::SmemLayoutGradOt, kHeadDimV>(
            "dV", "dV += P^T dO", "S", "p", "grad_o"))
        .add(key_product<typename Operands::Qt, typename Traits::SmemLayoutQt, kHeadDim>(
            "dK", "dK += dS^T Q", "dP", "grad_s", "q"))
        .add(product_json("dQ", "dQ = dS K", kMma, kTileM, kHeadDim, kTileN, st, kt,
                          accumulator_json<MmaQ, kTileM, kHeadDim>()));
  }

  // The product for dV or dK. A warp multiplies its own part of the queries from registers, and
  // then the parts of the warps that have the same keys, from shared memory.
  template <class PartOfB, class LayoutB, int kCols>
  static Json key_product(char const* name, char const* formula, char const* accumulator,
                          char const* a, char const* b) {
    using ViewA = ColumnsOf<LayoutP, kPartM>;
    using ViewB = ColumnsOf<LayoutB, kPartM>;
    Json parts = Json::array();
    for (int i = 0; i < kWarpsM; ++i) {
      auto const part_a = i == 0 ? scores_operand_json<Scores>(accumulator)
                                 : smem_operand_json<typename Operands::P, OperandA, MmaKV,
                                                     typename Operands::P, typename ViewA::Layout>(
                                       a, cuts<ViewA>(i), starts(i, Operands::part_of_p));
      auto const part_b = smem_operand_json<PartOfB, OperandB, MmaKV, typename Operands::Qt,
                                            typename ViewB::Layout>(
          b, cuts<ViewB>(i), starts(i, Operands::template part_of_t<kCols>));
      parts.add(Json::object().set("a", part_a).set("b", part_b));
    }
    return Json::object()
        .set("name", name)
        .set("formula", formula)
        .set("instruction", kMma)
        .set("tile", Json::array().add(kTileN).add(kCols).add(kTileM))
        .set("origins", json_array({origin_json(0, 0)}))
        .set("parts", parts)
        .set("c", accumulator_json<MmaKV, kTileN, kCols>());
  }

  // For each warp: which part of the queries it multiplies as the i-th after its own.
  static std::vector<int> columns(int i) {
    std::vector<int> columns;
    for (int warp = 0; warp < kWarpsN * kWarpsM; ++warp) {
      columns.push_back(Operands::column_after(warp / kWarpsN, i));
    }
    return columns;
  }

  // Where that part begins, before the swizzle: in elements, as CuTe cuts the tile, and in bytes,
  // as the kernel computes it.
  template <class View>
  static std::vector<int> cuts(int i) {
    auto cuts = columns(i);
    std::transform(cuts.begin(), cuts.end(), cuts.begin(), View::offset);
    return cuts;
  }
  static std::vector<int> starts(int i, int (*begin)(int)) {
    auto starts = columns(i);
    std::transform(starts.begin(), starts.end(), starts.begin(), begin);
    return starts;
  }

  static Json roles() {
    return Json::array().add(role_json(
        "all", Traits::kThreads, kMaxRegisters, false,
        json_array({json_array({"dV", "dK", "dQ", "S"}), json_array({"dV", "dK", "S", "dP"}),
                    json_array({"dV", "dK", "dQ"})})));
  }

  static constexpr char const* kMma = "mma.m16n8k16";
};

template <class Row>
using Sm80BackwardKernels = Kernels<Sm80Backward<sm80::BackwardTraits<Row>>>;

}  // namespace cute_attention::layouts
