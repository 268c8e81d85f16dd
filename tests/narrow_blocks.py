"""Kernels that no row has, as C++ that the exporter compiles.

Their tiles of 64 x 48 lie in blocks of 16 columns, whose rows of 32 bytes are swizzled by one bit.
TMA writes the tiles of the first kernel with that swizzle, and the second's with one of two bits.
"""

NARROW_BLOCKS = """
namespace narrow {
using Element = cutlass::bfloat16_t;
template <class Atom, int kRows, int kCols, class Order>
using Tile = decltype(cute::tile_to_shape(
    Atom{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::_1>{}, Order{}));
using LayoutK = Tile<cute::GMMA::Layout_K_SW32_Atom<Element>, 64, 48,
                     cute::Step<cute::_1, cute::_2, cute::_3>>;
using LayoutKt = Tile<cute::GMMA::Layout_MN_SW32_Atom<Element>, 48, 64,
                      cute::Step<cute::_2, cute::_1, cute::_3>>;
using MmaS = decltype(cute::make_tiled_mma(cute::GMMA::ss_op_selector<
    Element, Element, float, cute::Shape<cute::_64, cute::_64, cute::Int<48>>>()));
using MmaQ = decltype(cute::make_tiled_mma(cute::GMMA::rs_op_selector<
    Element, Element, float, cute::Shape<cute::_64, cute::Int<48>, cute::_64>,
    cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
template <int kBits>
struct Boxes {
  static constexpr int kRows = 64, kCols = 16, kCount = 3, kSwizzleBits = kBits;
  static constexpr int col(int box) { return box * kCols; }
  static constexpr int offset(int box, int row = 0) { return (box * kRows + row) * kCols; }
};
}  // namespace narrow

template <int kBits>
struct NarrowBlocks {
  static constexpr char const* kName = "";
  static constexpr int kTileM = 64, kTileN = 64;
  using Tile = layouts::RowsOfGroups<narrow::LayoutK, 1>;
  using Scores = layouts::AccumulatorLayout<narrow::MmaS, 64, 64>;
  static constexpr int kAlignment = layouts::swizzle_alignment<narrow::LayoutK>();
  static Json plan() {
    return Json::object().set("phases", json_array({"all"})).set("bytes", 2 * 6144).set(
        "buffers", json_array({layouts::buffer_json("q", 0, 6144, kAlignment, 0, 0),
                               layouts::buffer_json("k", 6144, 6144, kAlignment, 0, 0)}));
  }
  static Json roles() {
    return json_array({layouts::role_json("all", 128, 255, false,
                                          json_array({json_array({"S", "dQ"})}))});
  }
  static Json copies() {
    return json_array({layouts::boxes_json<Tile, narrow::Boxes<kBits>>("q"),
                       layouts::boxes_json<Tile, narrow::Boxes<kBits>>("k")});
  }
  static Json products() {
    using namespace layouts;
    auto const sK = tensor_at_zero<narrow::Element, narrow::LayoutK>();    // (64, 48, 1)
    auto const sKt = tensor_at_zero<narrow::Element, narrow::LayoutKt>();  // (48, 64, 1)
    return json_array(
        {wgmma_product_json<narrow::MmaS>("S", "S = Q K^T", 64, 64, 48,
                                          operand_a_of_each_json<narrow::MmaS>("q", sK, 1),
                                          operand_b_json<narrow::MmaS>("k", false, sK),
                                          accumulator_json<narrow::MmaS, 64, 64>()),
         wgmma_product_json<narrow::MmaQ>("dQ", "dQ += S K", 64, 48, 64,
                                          scores_operand_json<Scores>("S"),
                                          operand_b_json<narrow::MmaQ>("k", true, sKt),
                                          accumulator_json<narrow::MmaQ, 64, 48>())});
  }
};
template <class Row>
using NarrowBlocksOf = layouts::Kernels<NarrowBlocks<1>, NarrowBlocks<2>>;
"""
