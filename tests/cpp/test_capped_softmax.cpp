// test_capped_softmax.cpp: runs the softmax that applies softcap by itself in an emulated warp, and
// compares its probabilities, sums and bases with float64. What other rows of the warp hold never
// changes the bits of a row.
#include "layouts/host_cuda.h"
// The headers below need the one above, and this function.
inline float __fdividef(float a, float b) { return a / b; }

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cute_attention/core/capped_softmax.h"
#include "host_warp.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kRows = 2, kCols = 8, kTiles = 3;   // of a thread
constexpr int kWarpRows = 16, kKeys = 4 * kCols;  // of the warp, of a tile

struct IntegerWarp : testing::HostWarp {
  static int max3(int a, int b, int c) { return std::max(a, std::max(b, c)); }
  static uint32_t max3_unsigned(uint32_t a, uint32_t b, uint32_t c) {
    return std::max(a, std::max(b, c));
  }
};
using Softmax = CappedSoftmax<kRows, IntegerWarp>;

// Scores of a warp, in tiles, and which of them a mask hides.
struct Scores {
  float score[kTiles][kWarpRows][kKeys] = {};
  bool hidden[kTiles][kWarpRows][kKeys] = {};
  bool masked[kTiles] = {};
};
// What a warp computed: probabilities relative to the last base, the sums and the bases.
struct Result {
  float probability[kTiles][kWarpRows][kKeys];
  float sum[kWarpRows], base[kWarpRows];
};

Result run(Scores const& scores, float scale, float softcap) {
  Result result;
  std::string const divergence = IntegerWarp::divergence([&](int lane) {
    Softmax softmax(scale, softcap);
    auto const row = [&](int i) { return lane / 4 + 8 * i; };
    auto const key = [&](int j) { return 2 * (lane % 4) + j % 2 + 8 * (j / 2); };
    for (int tile = 0; tile < kTiles; ++tile) {
      auto tS = cute::make_tensor<float>(cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{});
      auto tP = cute::make_fragment_like(tS);
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kCols; ++j) tS(i, j) = scores.score[tile][row(i)][key(j)];
      CappedCurve const curve = softmax.curve();
      Softmax::Rows maxima, bases, factors, sums;
      bool near;
      if (scores.masked[tile]) {
        near = softmax.all_near(curve, tS);
        if (!near) softmax.bound_far(tS);
        for (int i = 0; i < kRows; ++i)
          for (int j = 0; j < kCols; ++j)
            if (scores.hidden[tile][row(i)][key(j)]) tS(i, j) = -kInfinity;
        maxima = softmax.maxima(tS);
      } else {
        near = softmax.look(curve, tS, maxima);
      }
      maxima = softmax.row_maxima(maxima);
      if (near) {
        softmax.raise<true>(curve, maxima, bases, factors);
        softmax.exponentiate_near(curve, tS, bases, tP, sums);
      } else {
        softmax.raise<false>(curve, maxima, bases, factors);
        if (scores.masked[tile]) {
          softmax.exponentiate_far<4, true>(curve, tS, bases, tP, sums);
        } else {
          softmax.exponentiate_far<4, false>(curve, tS, bases, tP, sums);
        }
      }
      softmax.add(sums);
      for (int i = 0; i < kRows; ++i) {
        for (int before = 0; before < tile; ++before)
          for (int j = 0; j < kCols; ++j) result.probability[before][row(i)][key(j)] *= factors(i);
        for (int j = 0; j < kCols; ++j) result.probability[tile][row(i)][key(j)] = tP(i, j);
      }
    }
    auto const sums = softmax.sums(), bases = softmax.bases();
    for (int i = 0; i < kRows; ++i) {
      result.sum[row(i)] = sums(i);
      result.base[row(i)] = bases(i);
    }
  });
  check_equal(divergence, std::string(), "the warp stays together");
  return result;
}

// The scores of a row, as they are: each tile and key.
template <class Visit>
void each(Visit const& visit) {
  for (int tile = 0; tile < kTiles; ++tile)
    for (int key = 0; key < kKeys; ++key) visit(tile, key);
}

void check_row(Scores const& scores, Result const& result, int row, float scale, float softcap,
               std::string const& of) {
  double most = -kInfinity, sum = 0;
  auto const exact = [&](int tile, int key) {
    if (scores.masked[tile] && scores.hidden[tile][row][key]) return -double(kInfinity);
    double const score = scores.score[tile][row][key];
    return softcap * std::tanh(double(scale) * score / softcap);
  };
  each([&](int tile, int key) { most = std::fmax(most, exact(tile, key)); });
  each([&](int tile, int key) {
    if (most > -kInfinity) sum += std::exp(exact(tile, key) - most);
  });
  bool nan = false;
  each([&](int tile, int key) { nan |= std::isnan(exact(tile, key)); });
  if (nan) {
    check(std::isnan(result.sum[row]), of + ": NaN");
    return;
  }
  if (most == -kInfinity) {
    check_equal(result.sum[row], 0.f, of + ": no keys");
    check_equal(result.base[row], -kInfinity, of + ": base without keys");
    return;
  }
  // 6.3e-6 of a score near 0, 2e-6 of the cap elsewhere, twice: of the score and of the base.
  bool far = false;
  each([&](int tile, int key) {
    far |= std::abs(double(scale) * scores.score[tile][row][key]) > 0.4 / 64 * softcap;
  });
  double const largest = std::abs(most) + std::min(softcap, 1e6f);
  double const error =
      2 * (6.5e-6 * std::min(0.45 * softcap, largest) + (far ? 3e-6 * softcap : 0));
  double const lse = (result.base[row] + std::log2(result.sum[row])) * M_LN2;
  check(std::abs(lse - (most + std::log(sum))) <= error + 1e-5, of + ": LSE");
  each([&](int tile, int key) {
    double const expected = std::exp(exact(tile, key) - most - std::log(sum));
    double const found = double(result.probability[tile][row][key]) / result.sum[row];
    if (exact(tile, key) == -kInfinity) {
      check_equal(found, 0., of + ": hidden");
    } else {
      check(std::abs(found - expected) <= (2 * error + 1e-5) * expected + 1e-37, of + ": P");
    }
  });
}

bool same_row(Result const& a, Result const& b, int row) {
  bool same = std::memcmp(&a.sum[row], &b.sum[row], 4) == 0 &&
              std::memcmp(&a.base[row], &b.base[row], 4) == 0;
  each([&](int tile, int key) {
    same &= std::memcmp(&a.probability[tile][row][key], &b.probability[tile][row][key], 4) == 0;
  });
  return same;
}

// A row of a kind: `spread` times normal scores, and what is special.
enum Kind { kCalm, kNegative, kFar, kAllFar, kInfinite, kHasNaN, kAllHidden, kOverflown, kKinds };

void fill_row(Scores& scores, int row, Kind kind, float unit, std::mt19937& random) {
  std::normal_distribution<float> normal;
  float const spread = kind == kAllFar ? 40.f : 3.f;
  each([&](int tile, int key) {
    float score = spread * normal(random);
    if (kind == kNegative) score = -std::abs(score);
    if (kind == kOverflown) score = -kInfinity;
    scores.score[tile][row][key] = score * unit;
    // Of a tile before, the row may see no key.
    bool const none = kind == kAllHidden || (kind == kOverflown && tile == 0);
    scores.hidden[tile][row][key] = none || random() % 3 == 0;
  });
  float& one = scores.score[random() % kTiles][row][random() % kKeys];
  if (kind == kFar) one = (random() % 2 ? 200.f : -200.f) * unit;
  if (kind == kInfinite) one = random() % 2 ? kInfinity : -kInfinity;
  if (kind == kHasNaN) one = random() % 2 ? kNaN : -kNaN;
}

void check_mixtures(float scale, float softcap) {
  std::mt19937 random(7);
  std::string const of = "scale " + std::to_string(scale) + ", cap " + std::to_string(softcap);
  // Scores that no cap reaches in real models, beside a cap that changes none of them.
  float const unit = std::min(softcap, 1e6f) / 30.f / scale;
  for (int i = 0; i < 40; ++i) {
    Scores scores;
    Kind kinds[kWarpRows];
    for (int tile = 0; tile < kTiles; ++tile) scores.masked[tile] = random() % 2;
    for (int row = 0; row < kWarpRows; ++row) {
      kinds[row] = i < 5 ? kCalm : Kind(random() % kKinds);
      fill_row(scores, row, kinds[row], unit, random);
    }
    Result const mixed = run(scores, scale, softcap);
    for (int row = 0; row < kWarpRows; ++row) {
      check_row(scores, mixed, row, scale, softcap, of + ", kind " + std::to_string(kinds[row]));
    }
    // The same row among calm ones, and other numbers behind its mask.
    int const row = int(random() % kWarpRows);
    Scores calm = scores;
    for (int other = 0; other < kWarpRows; ++other) {
      if (other != row) fill_row(calm, other, kCalm, unit, random);
    }
    check(same_row(mixed, run(calm, scale, softcap), row), of + ": bits among calm rows");
    for (float hidden : {kNaN, -kInfinity, 1e30f, 0.f}) {
      Scores behind = scores;
      each([&](int tile, int key) {
        if (behind.masked[tile] && behind.hidden[tile][row][key]) {
          behind.score[tile][row][key] = hidden;
        }
      });
      check(same_row(mixed, run(behind, scale, softcap), row) || kinds[row] == kHasNaN ||
                kinds[row] == kInfinite,
            of + ": bits whatever is hidden");
    }
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
#ifdef __SSE__
  _mm_setcsr(_mm_getcsr() | 0x8040);  // numbers below 2^-126 are 0, as in the kernels
#endif
  for (float scale : {0.125f, 0.088388346f, 1.f}) {
    for (float softcap : {1.f, 15.f, 30.f, 50.f, 1000.f, 1e5f, 1e9f, 1e12f, 1e28f}) {
      check_mixtures(scale, softcap);
    }
  }
  return testing::report();
}
