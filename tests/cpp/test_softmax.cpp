// test_softmax.cpp: runs the softmax of the kernels in an emulated warp, and compares it with
// float64. The rows are of all kinds, mixed at random, and the walks over their tiles are those of
// the kernels.
//
// With the argument "quick" it tests fewer rows.
#include "layouts/host_cuda.h"  // before everything else

#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "softmax_problem.h"
#include "softmax_scores.h"
#include "softmax_walk.h"

namespace {

using namespace cute_attention;
using namespace cute_attention::testing;
using cutlass::bfloat16_t;
using cutlass::half_t;

bool quick = false;

template <class Element>
double unit() {
  return std::is_same_v<Element, half_t> ? 0x1p-11 : 0x1p-8;
}
template <class Element>
double smallest() {
  return std::is_same_v<Element, half_t> ? 0x1p-25 : 0;
}

// Whether `got` is within `bound` of `expected`. A NaN is near a NaN alone, and an infinity only
// near the same infinity.
bool near(double got, double expected, double bound) {
  if (std::isnan(expected)) return std::isnan(got);
  if (std::isinf(expected)) return got == expected;
  return std::abs(got - expected) <= bound;
}

// Compares all rows that belong to a query. Reports the first row that differs, and by how much.
template <class Element>
bool check_rows(Problem const& problem, Walked const& walked, std::string const& what) {
  std::string difference;
  for (int row = 0; row < problem.rows && difference.empty(); ++row) {
    if (!problem.query[row]) continue;
    ExactRow const exact = exact_row(problem, row, unit<Element>(), smallest<Element>());
    RowResult const& got = walked.rows[row];
    char text[200] = "";
    if (!near(got.lse, exact.lse, exact.lse_error)) {
      std::snprintf(text, sizeof(text), "row %d: LSE %.9g, not %.9g +- %.2g", row, got.lse,
                    exact.lse, exact.lse_error);
    }
    for (int column = 0; column < kHeadDim; ++column) {
      if (!near(got.output[column], exact.output[column], exact.output_error[column])) {
        std::snprintf(text, sizeof(text), "row %d: output %.9g, not %.9g +- %.2g", row,
                      got.output[column], exact.output[column], exact.output_error[column]);
      }
    }
    difference = text;
  }
  return check_equal(difference, std::string(), what);
}

double const kScales[] = {0.125, 0.088388346, 0.6, 1e-3, 0x1p-20};

// Puts rows of several kinds together into a warp, and compares the results of a walk (`way`).
template <class Element, class Way>
void test_mixtures(std::string const& name, int rows, bool lags, Way const& way) {
  int const count = quick ? 60 : 1000;
  Random random(20);
  Walked total;
  for (int i = 0; i < count; ++i) {
    Problem problem(rows, 2 * (1 + random.below(4)), float(random.one_of(kScales)));
    int const kinds = 1 + random.below(3);
    int const first = random.below(kFamilies);
    double const calm = random.one_of({0., 0.5, 0.9});
    for (int row = 0; row < problem.rows; ++row) {
      Family const other = Family((first + random.below(kinds)) % kFamilies);
      fill_row(problem, row, random.uniform() < calm ? Family::Calm : other, random);
    }
    for (char& masked : problem.masked) masked = random.below(4) == 0;
    Walked const walked = way(problem);
    check_rows<Element>(problem, walked, name + ", mixture " + std::to_string(i));
    total.tiles += walked.tiles;
    total.rescaled += walked.rescaled;
  }
  // In some tiles references must have been replaced. Where they may lag behind the maximum, many
  // must have stayed, too.
  int const stay = total.tiles - total.rescaled;
  check(total.rescaled > count && (!lags || stay > count / 4),
        name + ": references are replaced in some tiles and not in others");
  std::printf("%s: %d tiles, %d of them with new references\n", name.c_str(), total.tiles,
              total.rescaled);
}

template <class V>
void test_variant(std::string const& name) {
  test_mixtures<typename V::Element>(name, 8 * V::kRows, V::kLags, &Walk<V>::alone);
}

Problem of_family(Family family, int tiles, float scale, Random& random) {
  Problem problem(16, tiles, scale);
  for (int row = 0; row < problem.rows; ++row) fill_row(problem, row, family, random);
  return problem;
}

// Checks a walk over the problem, and that references are replaced in `rescaled` of its tiles.
template <class V>
void check_rescaled(Problem const& problem, int rescaled, std::string const& what) {
  Walked const got = Walk<V>::alone(problem);
  check_rows<typename V::Element>(problem, got, what);
  check_equal(got.rescaled, rescaled, what + ": tiles with new references");
}

// Problems for which one knows in how many tiles references must be replaced.
template <class V>
void test_number_of_rescaled_tiles() {
  int const tiles = 8;
  Problem const equal(16, tiles, 1.f);
  check_rescaled<V>(equal, 1, "scores of zero");

  for (float step : {20.f, 80.f, 300.f}) {
    for (int one_row = 0; one_row < 2; ++one_row) {
      Problem grows = equal;
      Problem falls = equal;
      for (int tile = 0; tile < tiles; ++tile) {
        for (int row = one_row ? 13 : 0; row < (one_row ? 14 : 16); ++row) {
          for (int column = 0; column < kColumns; ++column) {
            grows.at(tile, row, column) = step * tile;
            falls.at(tile, row, column) = -step * tile;
          }
        }
      }
      std::string const name = std::to_string(int(step)) + " a tile";
      check_rescaled<V>(grows, tiles, "scores that grow by " + name);
      check_rescaled<V>(falls, 1, "scores that fall by " + name);
    }
  }

  // A row whose scores so far are all -infinity has no reference; its first key gives it one.
  for (int first = 1; first <= tiles; ++first) {
    Problem late = equal;
    for (int tile = 0; tile < first; ++tile) {
      std::fill_n(&late.at(tile, 6, 0), kColumns, -INFINITY);
    }
    check_rescaled<V>(late, first < tiles ? 2 : 1, "a row with late keys");
    late.masked.assign(tiles, 1);
    check_rescaled<V>(late, first < tiles ? 2 : 1, "a row with late keys, and masks");
  }

  Problem large = equal;
  std::fill(large.scores.begin(), large.scores.end(), 1e10f);
  check_rescaled<V>(large, 1, "scores of 1e10");
}

// A score that is NaN makes its own row NaN, and changes no bit of another row.
template <class V>
void test_nan() {
  Random random(30);
  for (int i = 0; i < (quick ? 40 : 400); ++i) {
    Problem problem(16, 6, 0.125f);
    int const row = random.below(16);
    for (int other = 0; other < 16; ++other) {
      Family const family = Family(random.below(kFamilies - 3));
      fill_row(problem, other, other == row ? Family::Calm : family, random);
    }
    Walked const before = Walk<V>::alone(problem);
    problem.at(random.below(6), row, random.below(kColumns)) = NAN;
    Walked const after = Walk<V>::alone(problem);
    check_rows<typename V::Element>(problem, after, "a row with NaN");
    int changed = 0;
    for (int other = 0; other < 16; ++other) {
      changed += other != row && !(after.rows[other] == before.rows[other]);
    }
    check_equal(changed, 0, "rows that another row's NaN changes, at " + std::to_string(i));
  }
}

// Rows that belong to no query may hold anything: they change no bit of the rows of queries.
template <class V>
void test_no_queries() {
  Random random(31);
  double const garbage[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e10, 500, 100, 1};
  for (int i = 0; i < (quick ? 40 : 400); ++i) {
    Problem problem(16, 6, 0.125f);
    int const queries = 1 + random.below(15);
    for (int row = 0; row < queries; ++row) {
      fill_row(problem, row, Family(random.below(kFamilies)), random);
      if (i % 2) fill_row(problem, row, Family::Calm, random);
    }
    for (int row = queries; row < 16; ++row) problem.query[row] = 0;
    Walked const zeros = Walk<V>::alone(problem);
    for (int tile = 0; tile < problem.tiles; ++tile) {
      for (int row = queries; row < 16; ++row) {
        double const most = random.one_of(garbage);
        for (int column = 0; column < kColumns; ++column) {
          problem.at(tile, row, column) = float(most * random.normal());
        }
      }
    }
    Walked const got = Walk<V>::alone(problem);
    check_rows<typename V::Element>(problem, got, "rows beside garbage");
    int changed = 0;
    for (int row = 0; row < queries; ++row) changed += !(got.rows[row] == zeros.rows[row]);
    check_equal(changed, 0, "queries that garbage changes, at " + std::to_string(i));
  }
}

// The results of a row have the same bits wherever in the warp the row stands.
template <class V>
void test_order_of_rows() {
  Random random(32);
  for (int i = 0; i < (quick ? 20 : 200); ++i) {
    Problem problem(16, 6, 0.125f);
    for (int row = 0; row < 16; ++row) {
      fill_row(problem, row, Family(random.below(kFamilies)), random);
      if (i % 2) fill_row(problem, row, Family::Calm, random);
    }
    std::vector<int> from(16);
    std::iota(from.begin(), from.end(), 0);
    if (i % 4 < 2) {
      std::rotate(from.begin(), from.begin() + 8, from.end());
    } else {
      for (int row = 15; row > 0; --row) std::swap(from[row], from[random.below(row + 1)]);
    }
    Problem moved = problem;
    for (int tile = 0; tile < problem.tiles; ++tile) {
      for (int row = 0; row < 16; ++row) {
        std::copy_n(&problem.at(tile, from[row], 0), kColumns, &moved.at(tile, row, 0));
      }
    }
    Walked const before = Walk<V>::alone(problem);
    Walked const after = Walk<V>::alone(moved);
    int changed = 0;
    for (int row = 0; row < 16; ++row) changed += !(after.rows[row] == before.rows[from[row]]);
    check_equal(changed, 0, "rows that another place changes, at " + std::to_string(i));
  }
}

// Scores so large that neighbouring floats are far apart. The softmax must still see their
// differences.
template <class V>
void test_large() {
  Random random(33);
  for (float scale : {1e-3f, 0.125f, 1.f, 10.f}) {
    for (Family family : {Family::Near, Family::Depths, Family::Equal, Family::Dominant,
                          Family::HiddenTiles, Family::HiddenKeys}) {
      for (int i = 0; i < (quick ? 10 : 100); ++i) {
        Problem problem = of_family(family, 4, scale, random);
        for (int row = 0; row < 16; row += 3) fill_row(problem, row, Family::Calm, random);
        std::string const name = "large scores, family " + std::to_string(int(family));
        check_rows<typename V::Element>(problem, Walk<V>::alone(problem), name);
      }
    }
  }
}

// Half of the rows grow in many tiles, so that the output is rescaled again and again. If the
// factors of the other rows had errors, these would add up.
template <class V>
void test_long_growth() {
  Problem problem(16, quick ? 100 : 400, 1.f);
  for (int tile = 0; tile < problem.tiles; ++tile) {
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < kColumns; ++column) {
        float const noise = value_of(column, row);
        problem.at(tile, row, column) = row % 2 ? 700.f + row + noise : 23.f * tile + noise;
      }
    }
  }
  check_rows<typename V::Element>(problem, Walk<V>::alone(problem), "a row that grows and grows");
}

// Scores that grow as fast as the sum of their row. They do not exceed the reference by more than
// the sum, so the reference stays until a probability would not fit into 16 bits.
void test_creeping_growth() {
  Problem problem(16, 16, float(M_LN2));
  for (int tile = 0; tile < problem.tiles; ++tile) {
    std::fill_n(&problem.at(tile, 0, 0), 16 * kColumns, 3.05f * tile - 0.2f * (tile > 0));
  }
  Walked const got = Walk<Online<half_t, 2>>::alone(problem);
  check_rows<half_t>(problem, got, "scores that creep upwards");
  check(got.rescaled > 1 && got.rescaled < got.tiles / 2, "references follow now and then");
}

// Walks of 16 rows of bf16 whose answers are known, or in which some rows must not see others.
template <class V>
void test_known_rows() {
  test_number_of_rescaled_tiles<V>();
  test_nan<V>();
  test_no_queries<V>();
  test_order_of_rows<V>();
  test_large<V>();
  test_long_growth<V>();
}

}  // namespace

int main(int count, char** arguments) {
  quick = count > 1 && std::string(arguments[1]) == "quick";
  using InPlace = Online<bfloat16_t, 2>;
  test_variant<Straight<bfloat16_t>>("sm90 bf16");
  test_variant<Straight<half_t>>("sm90 fp16");
  test_variant<Straight<bfloat16_t, true>>("sm90 bf16, row by row");
  test_variant<Straight<half_t, true>>("sm90 fp16, row by row");
  test_variant<Straight<bfloat16_t, true, true>>("sm90 bf16, factors by a minimum");
  test_variant<InPlace>("sm90 bf16, in place");
  test_variant<Online<bfloat16_t, 2, 14, true>>("sm90 bf16, scores that lack a number");
  test_variant<Online<half_t, 4>>("sm80 fp16");
  test_mixtures<half_t>("sm80 fp16, shared keys", 16, false, Walk<Online<half_t, 2, 0>>::shared);
  test_known_rows<Straight<bfloat16_t>>();
  test_known_rows<Straight<bfloat16_t, true>>();
  test_known_rows<Straight<bfloat16_t, true, true>>();
  test_known_rows<InPlace>();
  test_creeping_growth();
  return report();
}
