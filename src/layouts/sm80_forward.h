// sm80_forward.h: describes the layouts of the sm80 forward kernel. It takes them from the traits,
// and pairs copies and layouts as the kernel does.
#pragma once

#include <vector>

#include "layouts/describe.h"
#include "layouts/operands.h"

#include "cute_attention/sm80/forward_operand.h"
#include "cute_attention/sm80/forward_traits.h"

namespace cute_attention::layouts {

template <class Traits>
struct Sm80Forward {
  static constexpr char const* kName = "";
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr bool kSharesKeys = Traits::kSharesKeys;
  static constexpr bool kPInSharedMemory = Traits::kPInSharedMemory;
  using SharedMemory = typename Traits::SharedMemory;
  using Operands = sm80::ForwardOperands<Traits>;

  static Json plan() {
    static SharedMemory const plan{};
    Json buffers = Json::array();
    buffers.add(buffer_json("q", plan, plan.q, kBankRow, 0, 1))
        .add(buffer_json("o", plan, plan.o, kBankRow, 2, 2))
        .add(buffer_json("k", plan, plan.k, kBankRow, 0, 1))
        .add(buffer_json("v", plan, plan.v, kBankRow, 0, 1));
    if constexpr (kPInSharedMemory) {
      buffers.add(buffer_json("p", plan, plan.p, kBankRow, 0, 1));
    }
    if constexpr (kSharesKeys) {
      buffers.add(buffer_json("rows", plan, plan.rows, 16, 0, 2));
    }
    return Json::object()
        .set("phases", json_array({"S = Q K^T", "O += P V", "write O"}))
        .set("bytes", int(sizeof(SharedMemory)))
        .set("buffers", buffers);
  }

  using TiledMma = typename Traits::TiledMma;
  using Scores = AccumulatorLayout<TiledMma, kTileM, kTileN>;
  using Output = AccumulatorLayout<TiledMma, kTileM, kHeadDimV>;

  static Json copies() {
    using LayoutO = typename Traits::SmemLayoutO;
    Json copies = Json::array();
    copies.add(tile_copy_json<typename Traits::GmemCopyQK, typename Traits::SmemLayoutQ>("q", true))
        .add(walked_copy_json<typename Traits::GmemCopyQK, typename Traits::SmemLayoutK>("k"))
        .add(walked_copy_json<typename Traits::GmemCopyV, typename Traits::SmemLayoutV>("v"));
    if constexpr (kPInSharedMemory) {
      using LayoutP = typename Traits::SmemLayoutP;
      copies.add(
          placed_fragment_json<typename Operands::PlaceOfP, TiledMma, LayoutP, Scores>("p", "S"));
    }
    if constexpr (kSharesKeys) {
      copies.add(row_exchange_json());
    }
    return copies
        .add(placed_fragment_json<typename Operands::PlaceOfO, TiledMma, LayoutO, Output>("o", "O"))
        .add(tile_copy_json<typename Traits::GmemCopyO, LayoutO>("o", false));
  }

  // Through the buffer `rows`, warps that have the same rows of S exchange the maxima and sums of
  // these rows. Lists for each warp the column of the buffer that it writes to.
  static Json row_exchange_json() {
    std::vector<int> columns;
    for (int warp = 0; warp < Traits::kThreads / 32; ++warp) {
      columns.push_back(decltype(SharedMemory::rows)::column(32 * warp));
    }
    return Json::object()
        .set("kind", "exchange")
        .set("tensor", "rows")
        .set("accumulator", "S")
        .set("columns", json_array(columns));
  }

  static Json products() {
    auto const q = smem_operand_json<typename Operands::Q, OperandA, TiledMma>("q");
    auto const k = smem_operand_json<typename Operands::K, OperandB, TiledMma>("k");
    auto const v = smem_operand_json<typename Operands::V, OperandB, TiledMma>("v");
    auto const p = [] {
      if constexpr (kPInSharedMemory) {
        return smem_operand_json<typename Operands::P, OperandA, TiledMma>("p");
      } else {
        return scores_operand_json<Scores>("S");
      }
    }();
    return Json::array()
        .add(product_json("S", "S = Q K^T", "mma.m16n8k16", kTileM, kTileN, kHeadDim, q, k,
                          accumulator_json<TiledMma, kTileM, kTileN>()))
        .add(product_json("O", "O += P V", "mma.m16n8k16", kTileM, kHeadDimV, kTileN, p, v,
                          accumulator_json<TiledMma, kTileM, kHeadDimV>()));
  }

  static Json roles() {
    return Json::array().add(role_json("load, multiply, store", Traits::kThreads, kMaxRegisters,
                                       false,
                                       json_array({json_array({"O", "S"}), json_array({"O"})})));
  }
};

template <class Row>
using Sm80ForwardKernels = Kernels<Sm80Forward<sm80::ForwardTraits<Row>>>;

}  // namespace cute_attention::layouts
