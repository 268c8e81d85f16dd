// test_alibi.cpp: the terms of ALiBi that a thread adds to its scores, forward and backward,
// against the formula, for tiles on both sides of the diagonal and across it.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <cmath>
#include <limits>
#include <string>

#include <cute/atom/mma_atom.hpp>

#include "check.h"
#include "cute_attention/core/alibi.h"
#include "cute_attention/core/score_mod.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;
using namespace cute;

constexpr int kTileM = 64, kTileN = 32, kThreads = 128;
// Four warps of 16 rows each, as sm80 has them; WGMMA gives a thread the same rows and columns.
using Mma = decltype(make_tiled_mma(SM80_16x8x16_F32F16F16F32_TN{}, Layout<Shape<_4, _1, _1>>{}));
using MmaOfTranspose =
    decltype(make_tiled_mma(SM80_16x8x16_F32F16F16F32_TN{}, Layout<Shape<_2, _2, _1>>{}));

struct Place {
  int32_t seqlen_q, seqlen_k, m_begin, n_begin;
};

// The distance of a query from a key, as docs/design.md counts it.
double distance(Place const& place, int query, int key) {
  return std::abs(double(query) + place.seqlen_k - place.seqlen_q - key);
}

Sequence sequence_of(Place const& place) {
  return make_sequence(place.seqlen_q, place.seqlen_k, 0, 0, kUnbounded, kUnbounded);
}

std::string name(Place const& place) {
  return "queries from " + std::to_string(place.m_begin) + " of " + std::to_string(place.seqlen_q) +
         ", keys from " + std::to_string(place.n_begin) + " of " + std::to_string(place.seqlen_k);
}

// Each thread adds to scores that are 1; `shift` heads share the tile, each with another slope.
template <class Term>
void check_forward(Place const& place, int shift) {
  Sequence const sequence = sequence_of(place);
  QueryPacking const packing{shift, 1 << shift, 1};
  float const slopes[] = {0.5f, -0.0625f, 0.f, 1.f};
  ForwardParams params{};
  float strided[8];
  for (int head = 0; head < 4; ++head) strided[2 * head] = slopes[head];
  params.alibi_slopes = {strided, 0, 2};
  constexpr float kUnit = 0.25f;
  for (int thread = 0; thread < kThreads; ++thread) {
    auto scores = partition_fragment_C(Mma{}, Shape<Int<kTileM>, Int<kTileN>>{});
    fill(scores, 1.f);
    auto const tile = make_score_tile<kTileM, kTileN>(Mma{}, thread, scores, sequence, packing,
                                                      place.m_begin, place.n_begin);
    using Tile = decltype(tile);
    typename Term::template OfRows<std::decay_t<Tile>::kRows> rows;
    auto const row_of = [&](int row) { return int(get<0>(tile.coords(row, 0))); };
    rows.load(params, 7, [&](int row) { return packing.head(row_of(row)); }, kUnit);
    Term::template add<half_t>(params, tile, rows);
    for (int row = 0; row < std::decay_t<Tile>::kRows; ++row) {
      for (int col = 0; col < std::decay_t<Tile>::kCols; ++col) {
        int const query = place.m_begin + packing.query(row_of(row));
        int const key = place.n_begin + int(get<1>(tile.coords(row, col)));
        double const slope = slopes[packing.head(row_of(row))];
        double const exact = 1 - slope / kUnit * distance(place, query, key);
        check(std::abs(tile.scores(row, col) - exact) <= 1e-7 * std::abs(exact),
              name(place) + ": a score of the forward");
      }
    }
  }
}

void check_backward(Place const& place, float slope) {
  Sequence const sequence = sequence_of(place);
  QueryPacking const packing = unpacked_queries();
  for (int thread = 0; thread < kThreads; ++thread) {
    auto scores = partition_fragment_C(MmaOfTranspose{}, Shape<Int<kTileN>, Int<kTileM>>{});
    auto const tile = make_score_tile_of_transpose<kTileM, kTileN>(
        MmaOfTranspose{}, thread, scores, sequence, packing, place.m_begin, place.n_begin);
    using Tile = std::decay_t<decltype(tile)>;
    AlibiTerm::OfStep<Tile> const terms(tile, {slope});
    for (int row = 0; row < Tile::kRows; ++row) {
      auto const of_query = terms.of_query(row);
      for (int col = 0; col < Tile::kCols; ++col) {
        int const query = place.m_begin + int(get<0>(tile.coords(row, col)));
        int const key = place.n_begin + int(get<1>(tile.coords(row, col)));
        double const exact = -double(slope) * M_LOG2E * distance(place, query, key);
        check(std::abs(of_query(col) - exact) <= 2e-7 * std::abs(exact),
              name(place) + ": a term of the backward");
      }
    }
  }
}

void check_places() {
  Place const places[] = {
      {64, 32, 0, 0},
      {200, 200, 64, 64},
      {200, 200, 64, 96},
      {200, 200, 128, 0},
      {200, 200, 0, 160},
      {70, 500, 64, 480},
      {500, 70, 0, 32},
      {500, 70, 448, 64},
      {200, 200, 64, 127},
      {200, 200, 64, 128},
      {200, 200, 95, 64},
      {200, 200, 94, 64},
      {1 << 20, 1 << 20, 1 << 19, 0},
      {kMaxSeqlen, kMaxSeqlen, kMaxSeqlen - 64, 0},
      {kMaxSeqlen, 32, 0, 0},
      {64, kMaxSeqlen, 0, 0},
  };
  for (Place const& place : places) {
    for (int shift = 0; shift <= 2; ++shift) {
      check_forward<AlibiTermOf<true>>(place, shift);
      check_forward<AlibiTermOf<false>>(place, shift);
    }
    for (float const slope : {0.25f, -0.5f, 0.f, 3.f}) check_backward(place, slope);
  }
}

// The slope of a head of a sequence, with strides.
void check_slopes() {
  float const slopes[] = {1, 2, 3, 4, 5, 6};
  ForwardParams params{};
  params.alibi_slopes = {slopes, 3, 1};
  check_equal(alibi_slope(params, 1, 2), 6.f, "a slope of [batch, heads]");
  params.alibi_slopes = {slopes, 0, 2};
  check_equal(alibi_slope(params, 5, 2), 5.f, "a slope of every other number");
}

// The lists of modifiers: which there are, the unit of the scores, and the derivative.
void check_lists() {
  ForwardParams params{};
  params.scale = 0.125f;
  params.softcap = 30.f;
  using None = ScoreModifiers<score_mods::None>;
  using Cap = ScoreModifiers<score_mods::Softcap>;
  using Line = ScoreModifiers<score_mods::Alibi>;
  using Both = ScoreModifiers<score_mods::Softcap | score_mods::Alibi>;
  static_assert(
      std::is_same_v<Both::List, ModifierList<SoftcapMapBy<PlainPolynomial>, AlibiTermOf<false>>>);
  static_assert(!None::kHasMap && !None::kHasTerm && Cap::kHasMap && !Cap::kHasTerm);
  static_assert(!Line::kHasMap && Line::kHasTerm && Both::kHasMap && Both::kHasTerm);
  static_assert(std::is_same_v<Cap::Terms, NoTerms> &&
                std::is_same_v<Both::Terms, AlibiTermOf<false>>);
  check_equal(None::exponent_scale(params), 0.125f, "unit without modifiers");
  check_equal(Line::exponent_scale(params), 0.125f, "unit with ALiBi");
  check_equal(Both::exponent_scale(params), 30.f, "unit with softcap and ALiBi");
  check_equal(Line(params).derivative<false>(0.5f), 1.f, "derivative of ALiBi");
  check_equal(Both(params).derivative<false>(0.5f), 0.75f, "derivative of softcap and ALiBi");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_places();
  check_slopes();
  check_lists();
  return testing::report();
}
