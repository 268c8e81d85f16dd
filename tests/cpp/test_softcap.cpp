// test_softcap.cpp: softcap of scores against tanh in double, for caps of any size and scores up to
// infinity; that a score does not depend on those beside it; its derivative; and hidden scores.
#include "layouts/host_cuda.h"
// The headers below need the one above, and these two functions.
inline float __fdividef(float a, float b) { return a / b; }
inline int __any_sync(unsigned, int vote) { return vote; }  // a warp of one thread

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include "check.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/softcap.h"
#include "cute_attention/params.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;
using namespace cute;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof(float)) == 0; }

template <class Map>
Map map_of(float scale, float softcap) {
  ForwardParams params{};
  params.softcap = softcap;
  check_equal(Map::unit_after(params, scale), softcap, "unit");
  return Map(params, scale);
}

// Four scores of a row, mapped in groups of kGroup.
template <int kGroup, class Map>
std::vector<float> mapped(Map const& map, std::vector<float> const& row, bool near) {
  auto scores = make_tensor<float>(Shape<_1, _4>{});
  for (int i = 0; i < 4; ++i) scores(i) = row[i];
  map.template map<kGroup>(scores, near);
  return {scores(0), scores(1), scores(2), scores(3)};
}

template <class Map>
float alone(Map const& map, float score, bool near) {
  return mapped<1>(map, {score, 0.f, 0.f, 0.f}, near)[0];
}

// Of one score: its value, that the easy way has the bits of the other one, and that it is odd.
template <class Map>
void check_score(Map const& map, float scale, float softcap, double x, std::string const& of) {
  float const score = float(x * softcap / scale);
  if (!std::isfinite(score)) return;
  double const exact = std::tanh(double(scale) * score / softcap);
  float const found = alone(map, score, false);
  // The polynomial has a relative error; the exponential an absolute one, of 2 ulp of 1 or less.
  double const relative = map.slope < 0x1p-17f ? 5.5e-6 : 3.5e-6;
  double const limit = std::min(relative * std::abs(exact) + 1e-37, 2.5e-6);
  bool const is_tiny_cap = softcap < 1e-5;  // nobody sees its scores
  check(std::abs(found - exact) <= (is_tiny_cap ? 1e-4 : limit), of + ": tanh");
  check(std::abs(found) <= 1.f, of + ": at most the cap");
  bool const near = map.all_near(make_tensor(&score, Shape<_1>{}));
  bool const is_usual = map.slope >= 0x1p-17f && map.slope <= 0x1p17f;
  check(near || std::abs(x) > (is_usual ? 0.6249 : 0.0624), of + ": near");
  check(!near || std::abs(x) < 0.6251, of + ": far");
  if (near) {
    check(same_bits(alone(map, score, true), found), of + ": bits of the easy way");
  }
  check(same_bits(alone(map, -score, false), -found) || !near, of + ": odd");
  // Whatever stands beside it in its group.
  for (float other : {0.f, score, 3 * score, kInfinity, -kInfinity, kNaN}) {
    std::vector<float> const group = mapped<4>(map, {other, score, other, other}, false);
    check(near ? same_bits(group[1], found)
               : std::isnan(other) || std::abs(group[1] - exact) <= 2.5e-6 || is_tiny_cap,
          of + ": in a group");
  }
}

template <class Map>
void check_cap(float scale, float softcap) {
  std::string const of = "scale " + std::to_string(scale) + ", cap " + std::to_string(softcap);
  auto const map = map_of<Map>(scale, softcap);
  for (double x = 1e-6; x < 1e3; x *= 1.0917) {
    check_score(map, scale, softcap, x, of);
  }
  for (double edge : {0.0625, 0.625}) {
    for (double factor : {0.9999, 0.9999999, 1., 1.0000001, 1.0001}) {
      check_score(map, scale, softcap, edge * factor, of);
    }
  }
  for (bool near : {false, true}) {
    check_equal(alone(map, 0.f, near), 0.f, of + ": 0");
    check(std::isnan(alone(map, kNaN, near)), of + ": NaN");
  }
  check_equal(alone(map, kInfinity, false), 1.f, of + ": infinity");
  check_equal(alone(map, -kInfinity, false), -1.f, of + ": -infinity");
  check_equal(alone(map, std::numeric_limits<float>::max(), false), 1.f, of + ": the largest");
  float const far[] = {0.f, -kInfinity, 0.f}, none[] = {kNaN, 0.f, kNaN};
  check(!map.all_near(make_tensor(&far[0], Shape<_3>{})), of + ": -infinity is not near");
  check(map.all_near(make_tensor(&none[0], Shape<_3>{})), of + ": NaN does not count");
}

// What the error is in scores, where models have their caps.
template <class Map>
void check_scores() {
  for (float softcap : {20.f, 30.f, 50.f}) {
    auto const map = map_of<Map>(0.125f, softcap);
    double most = 0;
    for (float score = -1000.f; score <= 1000.f; score += 0.0625f) {
      double const exact = softcap * std::tanh(0.125 * score / softcap);
      most = std::max(most, std::abs(softcap * double(alone(map, score, false)) - exact));
    }
    check(most <= 2e-6 * softcap, "the error of a score: " + std::to_string(most));
    check(most >= 1e-8 * softcap, "an error of rounding at least: " + std::to_string(most));
  }
}

void check_derivative() {
  check_equal(SoftcapMap::derivative<false>(0.5f), 0.75f, "derivative");
  check_equal(SoftcapMap::derivative<true>(0.5f), 0.75f, "derivative, of a finite score");
  check_equal(SoftcapMap::derivative<false>(1.f), 0.f, "derivative at the cap");
  check_equal(SoftcapMap::derivative<false>(-kInfinity), 0.f, "derivative of a hidden score");
  check_equal(SoftcapMap::derivative<false>(kNaN), 0.f, "derivative of a hidden NaN");
}

// P and dS / (dP + delta) of a hidden score are 0 for caps of any size, of queries that see no key
// too: with a sink of any size.
template <bool kFinite>
void check_hidden() {
  using Scores = BackwardScores<score_mods::Softcap, score_mods::None, kFinite>;
  static_assert((Scores::kHidden == -kInfinity) == !kFinite);
  for (float softcap : {1e-30f, 1e-12f, 1e-5f, 30.f, 1e5f, 1e30f}) {
    BackwardParams params{};
    params.scale = 0.125f;
    params.softcap = softcap;
    for (float lse : {0.f, -100.f, 100.f, kLowestLseLog2, kInfinity}) {
      float score = Scores::kHidden;
      float const factor = Scores(params).factor(score, lse, NoTerms{}, 0);
      std::string const name = " of a hidden score, with a cap of " + std::to_string(softcap);
      check_equal(score, 0.f, "P" + name);
      check_equal(factor, 0.f, "the factor of dP" + name);
    }
  }
}

template <class Map>
void check_map() {
  for (float scale : {0.125f, 0.0625f, 1.f}) {
    for (float softcap :
         {1e-12f, 1e-8f, 1e-6f, 1e-3f, 0.02f, 1.f, 15.f, 50.f, 1e3f, 1e5f, 1e6f, 1e8f, 1e11f}) {
      check_cap<Map>(scale, softcap);
    }
  }
  check_scores<Map>();
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
#ifdef __SSE__
  _mm_setcsr(_mm_getcsr() | 0x8040);  // numbers below 2^-126 are 0, as in the kernels
#endif
  check_map<SoftcapMap>();
  check_map<SoftcapMapBy<PlainPolynomial>>();
  check_derivative();
  check_hidden<false>();
  check_hidden<true>();
  return testing::report();
}
