// test_softmax.cpp: the softmax of the kernels, in an emulated warp, against float64: rows of all
// kinds, mixed at random, walked over as the kernels do.
//
// With the argument "quick" it walks over fewer of them.
#include "layouts/host_cuda.h"  // before everything else

#include <cutlass/numeric_types.h>

#include <cstdio>
#include <cstdlib>
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

// Whether `got` is within `bound` of `expected`; NaN and infinities only if they are the same.
bool near(double got, double expected, double bound) {
  if (std::isnan(expected)) return std::isnan(got);
  if (std::isinf(expected)) return got == expected;
  return std::abs(got - expected) <= bound;
}

// Compares the rows of queries. The first that differs is reported, and how.
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

double const kScales[] = {0.125, 0.125, 0.6, 1e-3, 0x1p-20, 0.088388346};

// Rows of all kinds together in a warp. Returns how the tiles were taken.
template <class Element, class Way>
Walked test_mixtures(std::string const& name, int rows, int count, Way const& way) {
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
    total.count(walked);
  }
  std::printf("%s: %d tiles taken, %d of them with new references; %d settled, %d raised\n",
              name.c_str(), total.taken, total.updated, total.settled, total.raised);
  return total;
}

template <class V>
void test_variant(std::string const& name, Output when) {
  test_mixtures<typename V::Element>(name, 8 * V::kRows, quick ? 100 : 1000,
                        [&](Problem const& problem) { return Walk<V>::alone(problem, when); });
}

}  // namespace

int main(int count, char** arguments) {
  quick = count > 1 && std::string(arguments[1]) == "quick";
  test_variant<Variant<bfloat16_t, 2, 2>>("sm90 bf16", Output::Late);
  test_variant<Variant<half_t, 2, 4>>("sm90 fp16", Output::Late);
  test_variant<Variant<bfloat16_t, 2, 0>>("sm90 bf16, take() alone", Output::Late);
  test_variant<Variant<half_t, 4, 1>>("sm80 fp16", Output::AtOnce);
  test_mixtures<half_t>("sm80 fp16, shared keys", 16, quick ? 100 : 1000,
                        Walk<Variant<half_t, 2, 0, 0>>::shared);
  return report();
}
