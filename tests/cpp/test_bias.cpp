// test_bias.cpp: what a bias adds to the scores of each thread, in every layout that a bias may
// have.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <cute/atom/mma_atom.hpp>

#include "check.h"
#include "cute_attention/core/bias.h"
#include "cute_attention/core/score_mod.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;
using namespace cute;

constexpr int kTileM = 64, kTileN = 32, kThreads = 128;
constexpr int kBatch = 2, kHeads = 4;
using Mma = decltype(make_tiled_mma(SM80_16x8x16_F32F16F16F32_TN{}, Layout<Shape<_4, _1, _1>>{}));
using MmaOfTranspose =
    decltype(make_tiled_mma(SM80_16x8x16_F32F16F16F32_TN{}, Layout<Shape<_2, _2, _1>>{}));

struct Place {
  int32_t seqlen_q, seqlen_k, m_begin, n_begin;
};

// A bias of known numbers. Each number that may be read is its own index modulo a prime, which fp16
// holds exactly; every other one is NaN.
template <class Number>
struct KnownBias {
  int64_t extent[4], stride[4];
  std::vector<Number> numbers;

  // `kept` has a bit for each dimension, batch first, that is not broadcast; rows have `padding`
  // more numbers than the bias has columns.
  KnownBias(int kept, int32_t seqlen_q, int32_t seqlen_k, int padding) {
    int64_t const full[] = {kBatch, kHeads, seqlen_q, seqlen_k};
    int64_t next = 1;
    for (int i = 3; i >= 0; --i) {
      bool const keeps = (kept >> i & 1) != 0;
      extent[i] = keeps ? full[i] : 1;
      stride[i] = keeps ? next : 0;
      next *= extent[i] + (i == 3 ? padding : 0);
    }
    numbers.assign(next, Number(std::numeric_limits<float>::quiet_NaN()));
    for (int64_t b = 0; b < extent[0]; ++b)
      for (int64_t h = 0; h < extent[1]; ++h)
        for (int64_t i = 0; i < extent[2]; ++i)
          for (int64_t j = 0; j < extent[3]; ++j) numbers[index(b, h, i, j)] = value(b, h, i, j);
  }
  int64_t index(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return b * stride[0] + h * stride[1] + i * stride[2] + j * stride[3];
  }
  Number value(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return Number(float(index(b, h, i, j) % 509));
  }
  BiasTensor tensor() {
    return {numbers.data(), stride[0],          stride[1],
            stride[2],      int32_t(stride[3]), sizeof(Number) == 4};
  }
};

constexpr float kUnit = 0.25f;  // exact, as are its products with the numbers

template <class Params, class Number>
Params params_of(KnownBias<Number>& bias, int32_t seqlen_q, int32_t seqlen_k) {
  Params params{};
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.scale = kUnit;
  params.bias = bias.tensor();
  return params;
}

// Checks the scores of a tile, which were 1. `longest` are params.seqlen_q and params.seqlen_k,
// which a packed sequence may exceed.
template <class Tile, class Number, class HeadOf>
void check_scores(Tile const& tile, KnownBias<Number> const& bias, int batch, HeadOf const& head_of,
                  Place const& longest, std::string const& what) {
  for (int row = 0; row < Tile::kRows; ++row) {
    int const query = tile.query(row);
    for (int col = 0; col < Tile::kCols; ++col) {
      int const key = tile.n_begin + int(get<1>(tile.coords(row, col)));
      float const score = tile.scores(row, col);
      if (query >= tile.sequence.seqlen_q) {
        check(score == 1.f, what + ": a query that is not there");
      } else if (key < tile.sequence.seqlen_k && query < longest.seqlen_q &&
                 key < longest.seqlen_k) {
        check(score == 1.f + float(bias.value(batch, head_of(row), query, key)) / kUnit,
              what + ": a score");
      } else {
        check(std::isnan(score), what + ": a key that the sequence or the bias does not have");
      }
    }
  }
}

template <class Number>
void check_tile(int kept, Place const& place, Place const& longest, int padding) {
  std::string const what = "kept " + std::to_string(kept) + ", queries from " +
                           std::to_string(place.m_begin) + " of " + std::to_string(place.seqlen_q) +
                           ", keys from " + std::to_string(place.n_begin) + " of " +
                           std::to_string(place.seqlen_k);
  KnownBias<Number> bias(kept, longest.seqlen_q, longest.seqlen_k, padding);
  Sequence const sequence =
      make_sequence(place.seqlen_q, place.seqlen_k, 0, 0, kUnbounded, kUnbounded);
  auto const forward = params_of<ForwardParams>(bias, longest.seqlen_q, longest.seqlen_k);
  auto const backward = params_of<BackwardParams>(bias, longest.seqlen_q, longest.seqlen_k);
  constexpr int kBatchIndex = 1;
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int shift = 0; shift <= 2; ++shift) {  // so many heads share the tile
      QueryPacking const packing{shift, 1 << shift, 1};
      auto scores = partition_fragment_C(Mma{}, Shape<Int<kTileM>, Int<kTileN>>{});
      fill(scores, 1.f);
      auto const tile = make_score_tile<kTileM, kTileN>(Mma{}, thread, scores, sequence, packing,
                                                        place.m_begin, place.n_begin);
      auto const head_of = [&](int row) {
        return packing.head(int(get<0>(tile.coords(row, 0)))) % kHeads;
      };
      BiasTerm::OfRows<std::decay_t<decltype(tile)>::kRows> rows;
      rows.load(forward, kBatchIndex, head_of, kUnit);
      BiasTerm::add<half_t>(forward, tile, rows);
      check_scores(tile, bias, kBatchIndex, head_of, longest, what + ", forward");
    }
    QueryPacking const packing = unpacked_queries();
    auto scores = partition_fragment_C(MmaOfTranspose{}, Shape<Int<kTileN>, Int<kTileM>>{});
    fill(scores, 1.f);
    auto const tile = make_score_tile_of_transpose<kTileM, kTileN>(
        MmaOfTranspose{}, thread, scores, sequence, packing, place.m_begin, place.n_begin);
    BiasTerm::add_of_head<half_t>(backward, tile, BiasTerm::of_head(backward, kBatchIndex, 3),
                                  kUnit);
    check_scores(tile, bias, kBatchIndex, [](int) { return 3; }, longest, what + ", backward");
  }
}

void check_tiles() {
  Place const places[] = {{64, 32, 0, 0},  {70, 45, 64, 32}, {70, 45, 0, 32},
                          {70, 45, 64, 0}, {1, 1, 0, 0},     {200, 100, 128, 96}};
  for (int kept = 0; kept < 16; ++kept) {
    for (Place const& place : places) {
      check_tile<half_t>(kept, place, place, 0);
      check_tile<float>(kept, place, place, 3);
    }
    // A packed sequence that is longer than the bias, whatever the caller has promised.
    Place const bias_of = {66, 40, 0, 0};
    check_tile<half_t>(kept, {70, 45, 64, 32}, bias_of, 1);
    check_tile<float>(kept, {30, 20, 0, 0}, bias_of, 0);
  }
}

void check_lists() {
  using One = ScoreModifiers<score_mods::Bias>;
  static_assert(std::is_same_v<One::List, ModifierList<BiasTerm>>);
  static_assert(!One::kHasMap && One::kHasTerm && !One::Terms::kInExponent);
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_tiles();
  check_lists();
  return testing::report();
}
