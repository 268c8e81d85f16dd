// sm90/bias_map.h: the tensor map of a bias, and which biases can have one.
#pragma once

#include "cute_attention/core/query_packing.h"
#include "cute_attention/sm90/bias_tiles.h"
#include "cute_attention/sm90/tensor_map.h"

namespace cute_attention::sm90 {

// Columns of 16 bits that a number of the bias has for TMA, which copies two of fp32.
inline int32_t columns_of_number(BiasTensor const& bias) { return bias.is_float ? 2 : 1; }

// Whether a tensor map can describe a bias of a call, or its gradient: keys side by side, and all
// rows at multiples of 16 bytes. `Params` is ForwardParams or BackwardParams.
template <class Params>
bool tma_describes(BiasTensor const& bias, Params const& params) {
  constexpr int64_t kVectorBytes = 16, kLongestStride = int64_t(1) << 40;  // of a tensor map
  int64_t const number_bytes = 2 * columns_of_number(bias);
  auto const is_allowed = [&](int64_t extent, int64_t stride) {
    int64_t const bytes = stride * number_bytes;
    return extent <= 1 || (bytes % kVectorBytes == 0 && bytes < kLongestStride / extent);
  };
  return bias.col_stride == 1 && params.seqlen_q > 0 && params.seqlen_k > 0 &&
         reinterpret_cast<uintptr_t>(bias.data) % kVectorBytes == 0 &&
         is_allowed(params.batch, bias.batch_stride) &&
         is_allowed(params.heads, bias.head_stride) && is_allowed(params.seqlen_q, bias.row_stride);
}

template <class Params>
bool tma_describes_bias(Params const& params) {
  return tma_describes(params.bias, params);
}

// Whether it can be loaded by kernels whose tiles have numbers of 16 bits.
template <class Params>
bool tma_loads_bias(Params const& params) {
  return params.bias.is_float == 0 && tma_describes_bias(params);
}

// The box of a tile of `rows` rows of scores: first the heads of the packing, then the queries, as
// far as they have numbers of their own.
inline Box bias_box(BiasTensor const& bias, int32_t rows, QueryPacking const& packing) {
  return {kBiasBox, bias.head_stride != 0 ? 1 << packing.shift : 1,
          bias.row_stride != 0 ? packing.queries(rows) : 1};
}

// The tiles of `rows` rows of scores and `cols` keys, but for their map.
inline BiasTiles unmapped_bias_tiles(BiasTensor const& bias, int32_t rows, int32_t cols,
                                     QueryPacking const& packing) {
  Box const box = bias_box(bias, rows, packing);
  BiasTiles tiles{};
  tiles.bytes = box.heads * box.rows * cols * columns_of_number(bias) * 2;
  tiles.has_batch = bias.batch_stride != 0;
  tiles.has_head = bias.head_stride != 0;
  tiles.has_row = bias.row_stride != 0;
  // Row r of scores is of query r >> shift and head r % 2^shift (query_packing.h).
  tiles.row_mask = tiles.has_row ? -1 : box.heads - 1;
  tiles.row_shift = tiles.has_head ? 0 : packing.shift;
  return tiles;
}

// The tiles of kRows rows of scores and kCols keys.
template <class Element, int kRows, int kCols, class Params>
cudaError_t make_bias_tiles(BiasTiles* tiles, Params const& params, QueryPacking const& packing) {
  BiasTensor const& bias = params.bias;
  *tiles = unmapped_bias_tiles(bias, kRows, kCols, packing);
  int64_t const columns = columns_of_number(bias);
  TensorView const view{
      bias.data,
      tiles->has_batch ? params.batch : 1,
      tiles->has_row ? params.seqlen_q : 1,
      tiles->has_head ? params.heads : 1,
      params.seqlen_k * columns,
      {bias.batch_stride * columns, bias.row_stride * columns, bias.head_stride * columns}};
  return make_tensor_map<Element>(&tiles->map, view, tiles->has_head ? packing.group : 1,
                                  bias_box(bias, kRows, packing));
}

}  // namespace cute_attention::sm90
