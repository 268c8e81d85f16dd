// softmax_scores.h: rows of scores that are difficult for an online softmax.
#pragma once

#include <cmath>
#include <limits>
#include <random>

#include "softmax_problem.h"

namespace cute_attention::testing {

class Random {
 public:
  explicit Random(uint32_t seed) : bits_(seed) {}

  int below(int limit) { return int(bits_() % uint32_t(limit)); }
  double uniform() { return double(bits_()) * 0x1p-32; }
  double normal() {
    return std::sqrt(-2 * std::log1p(-uniform())) * std::cos(2 * M_PI * uniform());
  }
  template <size_t kCount>
  double one_of(double const (&choices)[kCount]) {
    return choices[below(kCount)];
  }

 private:
  std::mt19937 bits_;
};

enum class Family {
  Calm,         // normally distributed, with a deviation of 1
  Normal,       // normally distributed, with a deviation of up to 300
  GrowByKey,    // each key has a larger score than the one before, or each a smaller one
  GrowByTile,   // the same from tile to tile
  Alternate,    // high and low scores, tile by tile in turn
  HiddenTiles,  // all keys of some tiles are hidden, by the same very negative score
  HiddenKeys,   // three quarters of the keys are hidden in this way
  LateKeys,     // all scores before some tile are -infinity
  Hidden,       // all scores are -infinity
  Dominant,     // a few keys have far larger scores than all others
  Depths,       // all scores are far below zero
  Equal,        // all scores are the same large number
  Near,         // all scores are large and differ by few ulps
};
constexpr int kFamilies = int(Family::Near) + 1;

// Whether a pattern covers a tile. Pattern 3 covers all tiles but the `chosen` one.
inline bool covers(int pattern, int tile, int tiles, int chosen) {
  switch (pattern) {
    case 0:
      return tile == 0;
    case 1:
      return tile == tiles / 2;
    case 2:
      return tile == tiles - 1;
    case 3:
      return tile != chosen;
    default:
      return tile % 2 == 0;
  }
}

// Fills a row with scores of a family. The numbers below are scores after the multiplication by the
// scale, except for those that hide keys, which are stored as they are.
inline void fill_row(Problem& problem, int row, Family family, Random& random) {
  double const infinity = std::numeric_limits<double>::infinity();
  double const lowest = std::numeric_limits<float>::lowest();
  double const deviation = random.one_of({0.1, 1., 3., 10., 30., 100., 300.});
  double const sign = random.below(2) ? 1 : -1;
  double const by_key = sign * random.one_of({0.1, 1., 3., 10., 300.});
  double const by_tile = sign * random.one_of({5., 11., 20., 60., 80., 300.});
  double const hidden = random.one_of({-infinity, -infinity, -1e30, lowest});
  double const large = sign * random.one_of({1e4, 3e5, 1e6, 1e10});
  double const start = random.one_of({0., 0., 50., -2000.});
  int const pattern = random.below(5);
  int const chosen = random.below(problem.tiles);
  for (int key = 0; key < problem.keys(); ++key) {
    int const tile = key / kColumns;
    double const noise = random.normal();
    double score = start + noise;
    bool hides = false;
    switch (family) {
      case Family::Calm:
        score = noise;
        break;
      case Family::Normal:
        score = noise * deviation;
        break;
      case Family::GrowByKey:
        score += by_key * key;
        break;
      case Family::GrowByTile:
        score += by_tile * tile;
        break;
      case Family::Alternate:
        score += tile % 2 ? by_tile : -by_tile;
        break;
      case Family::HiddenTiles:
        hides = covers(pattern, tile, problem.tiles, chosen);
        break;
      case Family::HiddenKeys:
        hides = random.below(4) > 0;
        break;
      case Family::LateKeys:
        hides = tile < chosen;
        break;
      case Family::Hidden:
        hides = true;
        break;
      case Family::Dominant:
        score = random.below(problem.keys()) < 2 ? std::abs(large) : noise * deviation;
        break;
      case Family::Depths:
        score = -std::abs(large) + noise * deviation;
        break;
      case Family::Equal:
        score = large;
        break;
      case Family::Near:
        score = large * (1 + noise * 0x1p-23);
        break;
    }
    bool const nothing = family == Family::Hidden || family == Family::LateKeys;
    problem.at(tile, row, key % kColumns) =
        hides ? float(nothing ? -infinity : hidden) : float(score / problem.scale);
  }
}

}  // namespace cute_attention::testing
