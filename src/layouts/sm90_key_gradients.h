// sm90_key_gradients.h: describes what the sm90 kernels that compute dK and dV have in common: how
// K, V, Q, dO, the LSE and delta reach shared memory and registers, and the products for S, dP, dV
// and dK.
#pragma once

#include "layouts/boxes.h"
#include "layouts/descriptors.h"

#include "cute_attention/sm90/backward_traits.h"

namespace cute_attention::layouts {

// Traits are those of the kernel. MmaOfP computes dP. kDeltaOfP: whether the kernel finds delta by
// the accumulator of dP, not by that of S.
template <class Traits, class MmaOfP, bool kDeltaOfP = false>
struct Sm90KeyGradients {
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  using Element = typename Traits::Element;
  using MmaS = typename Traits::MmaS;
  using MmaV = typename Traits::MmaV;
  using MmaK = typename Traits::MmaK;
  using Scores = AccumulatorLayout<MmaS, kTileN, kTileM>;
  using ScoresP = AccumulatorLayout<MmaOfP, kTileN, kTileM>;

  // The first stage of each buffer.
  using TileK = RowsOfGroups<typename Traits::SmemLayoutK, 1>;
  using TileV = RowsOfGroups<typename Traits::SmemLayoutV, 1>;
  using TileQ = RowsOfGroups<typename Traits::SmemLayoutQ, 1>;
  using TileGradO = RowsOfGroups<typename Traits::SmemLayoutGradO, 1>;

  using BoxesK = sm90::TmaBoxes<kTileN, kHeadDim, Traits::kBoxColsK>;
  using BoxesV = sm90::TmaBoxes<kTileN, kHeadDimV, Traits::kBoxV>;
  using BoxesQ = sm90::TmaBoxes<kTileM, kHeadDim, Traits::kBox>;
  using BoxesGradO = sm90::TmaBoxes<kTileM, kHeadDimV, Traits::kBoxV>;

  static constexpr int kAlignmentK = swizzle_alignment<typename Traits::SmemLayoutK>();
  static constexpr int kAlignmentV = swizzle_alignment<typename Traits::SmemLayoutV>();
  static constexpr int kAlignmentQ = swizzle_alignment<typename Traits::SmemLayoutQ>();
  static constexpr int kAlignmentGradO = swizzle_alignment<typename Traits::SmemLayoutGradO>();
  // A thread reads two numbers of the LSE or of delta at once.
  static constexpr int kAlignmentRow = 2 * int(sizeof(float));

  // A kernel finds the LSE by the accumulator of S.
  static Json inputs() {
    using LayoutRow = typename Traits::SmemLayoutRow;
    return Json::array()
        .add(boxes_json<TileK, BoxesK>("k"))
        .add(boxes_json<TileV, BoxesV>("v"))
        .add(boxes_json<TileQ, BoxesQ>("q"))
        .add(boxes_json<TileGradO, BoxesGradO>("grad_o"))
        .add(row_numbers_json<LayoutRow>("lse", "S", "S"))
        .add(row_numbers_json<LayoutRow>("delta", "dP", kDeltaOfP ? "dP" : "S"));
  }

  static Json score_and_key_products() {
    using namespace cute;
    auto const sK = tensor_at_zero<Element, typename Traits::SmemLayoutK>();       // (N, D, 1)
    auto const sV = tensor_at_zero<Element, typename Traits::SmemLayoutV>();       // (N, DV, 1)
    auto const sQ = tensor_at_zero<Element, typename Traits::SmemLayoutQ>();       // (M, D, STAGE)
    auto const sdO = tensor_at_zero<Element, typename Traits::SmemLayoutGradO>();  // (M, DV, STAGE)
    auto const sQt = tensor_at_zero<Element, typename Traits::SmemLayoutQt>();     // (D, M, STAGE)
    using LayoutGradOt = typename Traits::SmemLayoutGradOt;
    auto const sdOt = tensor_at_zero<Element, LayoutGradOt>();  // (DV, M, STAGE)
    return Json::array()
        .add(wgmma_product_json<MmaS>(
            "S", "S^T = K Q^T", kTileN, kTileM, kHeadDim, keys_json<MmaS>("k", sK),
            operand_b_json<MmaS>("q", false, sQ), accumulator_json<MmaS, kTileN, kTileM>()))
        .add(wgmma_product_json<MmaOfP>("dP", "dP^T = V dO^T", kTileN, kTileM, kHeadDimV,
                                        keys_json<MmaOfP>("v", sV),
                                        operand_b_json<MmaOfP>("grad_o", false, sdO),
                                        accumulator_json<MmaOfP, kTileN, kTileM>()))
        .add(wgmma_product_json<MmaV>("dV", "dV += P^T dO", kTileN, kHeadDimV, kTileM,
                                      scores_operand_json<Scores>("S"),
                                      operand_b_json<MmaV>("grad_o", true, sdOt),
                                      accumulator_json<MmaV, kTileN, kHeadDimV>()))
        .add(wgmma_product_json<MmaK>("dK", "dK += dS^T Q", kTileN, kHeadDim, kTileM,
                                      grad_scores_json(), operand_b_json<MmaK>("q", true, sQt),
                                      accumulator_json<MmaK, kTileN, kHeadDim>()));
  }

  // dS^T as the operand A of dK: from registers, or from shared memory (backward_chunks.h).
  static Json grad_scores_json() {
    using namespace cute;
    if constexpr (is_base_of_v<GMMA::DescriptorIterator, typename MmaK::FrgTypeA>) {
      using LayoutSt = typename Traits::SmemLayoutSt;
      return keys_json<MmaK>("grad_s", tensor_at_zero<Element, LayoutSt>());  // (N, M, 1)
    } else {
      return scores_operand_json<ScoresP>("dP");
    }
  }

  // K, V or dS^T, (N, COLS, 1), as the operand A of a product. The tiled MMA gives each of its
  // warpgroups 64 keys.
  template <class Mma, class Tensor>
  static Json keys_json(char const* tensor, Tensor const& keys) {
    using namespace cute;
    constexpr int kWarpgroups = decltype(size(Mma{}))::value / sm90::kWarpgroupThreads;
    return descriptors_json(tensor, false, "k", sm90::kWarpgroupM, kWarpgroups, [&](int warpgroup) {
      auto const thread_mma = Mma{}.get_slice(warpgroup * sm90::kWarpgroupThreads);
      return thread_mma.partition_fragment_A(keys)(_, _, _, 0);
    });
  }
};

}  // namespace cute_attention::layouts
