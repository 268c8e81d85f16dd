// core/bias.h: an additive bias: adds bias[b, h, i, j] to the score of query i and key j of head h
// of sequence b. Where it is -infinity, the key is hidden.
//
// Each thread reads the numbers of its own scores from global memory, in any layout: in their own
// type, with dimensions that are repeated. Numbers of the same rows that lie side by side come from
// the L1 cache. Kernels do so only where they cannot read faster (sm80/bias_tile.h,
// sm90/bias_tiles.h, sm90/bias_words.h).
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/config.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

// Where the bias of a head of a sequence begins.
template <class Params>
CUTE_HOST_DEVICE void const* bias_of_head(Params const& params, int32_t batch, int32_t head) {
  BiasTensor const& bias = params.bias;
  int64_t const index = batch * bias.batch_stride + head * bias.head_stride;
  return static_cast<char const*>(bias.data) + index * (bias.is_float ? 4 : 2);
}

// Whether a bias, or its gradient, consists of numbers of q's type whose rows, one behind the
// other or the same for all queries, begin at multiples of 16 bytes.
CUTE_HOST_DEVICE bool has_vectors(BiasTensor const& bias) {
  int64_t const strides = bias.batch_stride | bias.head_stride | bias.row_stride;
  return !bias.is_float && bias.col_stride == 1 && strides % 8 == 0 &&
         reinterpret_cast<uintptr_t>(bias.data) % 16 == 0;
}

// A modifier of scores (score_mod.h).
struct BiasTerm {
  static constexpr uint32_t kBit = score_mods::Bias;
  static constexpr bool kIsMap = false;
  // The backward adds it to the scores themselves, before it masks them: hidden keys may have any
  // bias, NaN too.
  static constexpr bool kInExponent = false;

  template <class Params>
  CUTE_HOST_DEVICE BiasTerm(Params const&, float) {}

  template <class Params>
  CUTE_HOST_DEVICE static float unit_after(Params const&, float unit) {
    return unit;
  }

  // Where the bias of the head of each of a thread's rows begins.
  template <int kRows>
  struct OfRows {
    void const* heads[kRows];
    float per_unit;  // what a number of the bias is multiplied by, in the unit of scores

    // head(row) has row `row`.
    template <class Params, class Head>
    CUTE_HOST_DEVICE void load(Params const& params, int32_t batch, Head const& head, float unit) {
      per_unit = 1.f / unit;
      CUTE_UNROLL
      for (int row = 0; row < kRows; ++row) {
        heads[row] = bias_of_head(params, batch, head(row));
      }
    }
  };

  // Adds the bias to the scores of a tile.
  //   Element  what a bias consists of that is not fp32
  template <class Element, class Params, class Tile>
  CUTE_HOST_DEVICE static void add(Params const& params, Tile const& tile,
                                   OfRows<Tile::kRows> const& rows) {
    add_to<Element>(params, tile, rows.per_unit, [&](int row) { return rows.heads[row]; });
  }

  // What a step of the backward needs to know of the head of its queries.
  struct OfHead {
    void const* data;  // where its bias begins
  };
  template <class Params>
  CUTE_HOST_DEVICE static OfHead of_head(Params const& params, int32_t batch, int32_t head) {
    return {bias_of_head(params, batch, head)};
  }

  // Adds the bias to scores of one head, in the backward.
  //   unit  of the scores
  template <class Element, class Params, class Tile>
  CUTE_HOST_DEVICE static void add_of_head(Params const& params, Tile const& tile,
                                           OfHead const& head, float unit) {
    add_to<Element>(params, tile, 1.f / unit, [&](int) { return head.data; });
  }

 private:
  //   head_of(row)  where the bias of the head of a row begins
  template <class Element, class Params, class Tile, class HeadOf>
  CUTE_HOST_DEVICE static void add_to(Params const& params, Tile const& tile, float per_unit,
                                      HeadOf const& head_of) {
    if (params.bias.col_stride == 0) {
      add_to_columns<Element, 0>(params, tile, per_unit, head_of);
    } else {
      add_to_columns<Element, 1>(params, tile, per_unit, head_of);
    }
  }
  template <class Element, int kColStride, class Params, class Tile, class HeadOf>
  CUTE_HOST_DEVICE static void add_to_columns(Params const& params, Tile const& tile,
                                              float per_unit, HeadOf const& head_of) {
    if (params.bias.is_float) {
      add_numbers<float, kColStride>(params, tile, per_unit, head_of);
    } else {
      add_numbers<Element, kColStride>(params, tile, per_unit, head_of);
    }
  }

  // Reads no number of a query or key that the sequence or the bias does not have. A packed
  // sequence may have more than the bias, where it is longer than params.seqlen_q or seqlen_k says:
  // its scores become NaN.
  template <class Number, int kColStride, class Params, class Tile, class HeadOf>
  CUTE_HOST_DEVICE static void add_numbers(Params const& params, Tile const& tile, float per_unit,
                                           HeadOf const& head_of) {
    int32_t const queries = min_of(tile.sequence.seqlen_q, params.seqlen_q);
    int32_t const keys = min_of(tile.sequence.seqlen_k, params.seqlen_k);
    uint32_t zero = 0;
    CUTE_UNROLL
    for (int row = 0; row < Tile::kRows; ++row) {
      int32_t const query = tile.query(row);
      int32_t const origin = tile.first_key(row);
      int32_t const keys_left = query < queries ? keys - origin : 0;
      // The mask hides keys that the sequence does not have, but not rows of queries that it does
      // not have, where NaN would make the softmax of the warp slower.
      float const missing = query < tile.sequence.seqlen_q ? NAN : 0.f;
      auto const* numbers = static_cast<Number const*>(head_of(row)) +
                            query * params.bias.row_stride + kColStride * origin + zero;
      CUTE_UNROLL
      for (int col = 0; col < Tile::kCols; ++col) {
        int const before = row * Tile::kCols + col;
        if (kColStride != 0 && before > 0 && before % kInFlight == 0) {
          zero = zero_after(tile.scores(col > 0 ? row : row - 1, (col > 0 ? col : Tile::kCols) - 1),
                            params.bias);
          numbers += zero;
        }
        int32_t const key = tile.keys_behind_first(row, col);
        float const number = key < keys_left ? float(numbers[kColStride * key]) : missing;
        tile.scores(row, col) = fmaf(number, per_unit, tile.scores(row, col));
      }
    }
  }

  // How many numbers a thread loads at a time. Without a limit ptxas loads all of them first, into
  // registers that are not there.
  static constexpr int kInFlight = 16;

  // Returns 0 as soon as the score is computed. The compiler does not know that col_stride is 0 or
  // 1, so an address to which it is added cannot be known sooner.
  CUTE_HOST_DEVICE static uint32_t zero_after(float score, BiasTensor const& bias) {
    return uint32_t(score > 0.f) & uint32_t(bias.col_stride >> 1);
  }
};

}  // namespace cute_attention
