// test_sink.cpp: a sink that joins a row, against the softmax with one more logit in double.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <cmath>
#include <limits>

#include "check.h"
#include "cute_attention/core/sink.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Joins `sink` to a row whose keys have the LSE `lse` and whose sum relative to its reference is 3.
void check_row(float lse, float sink) {
  std::string const what = "sink " + std::to_string(sink) + " of LSE " + std::to_string(lse);
  float factor = 1.f / 3, joined = lse;
  join_sink(sink, factor, joined);
  double const most = std::max(lse, sink);
  double const expected =
      most + std::log(std::exp(double(lse) - most) + std::exp(double(sink) - most));
  check(std::abs(joined - expected) <= 3e-7 * std::max(1., std::abs(expected)), what + ": LSE");
  // What all keys together weigh.
  double const weight = 1 / (1 + std::exp(double(sink) - lse));
  check(std::abs(factor * 3 - weight) <= 1e-6 * (1 + std::abs(double(sink) - lse)) * weight + 1e-38,
        what + ": factor");
}

void check_special_rows() {
  float factor = 0.f, lse = -kInfinity;
  join_sink(2.5f, factor, lse);
  check_equal(factor, 0.f, "factor of a row without keys");
  check_equal(lse, 2.5f, "LSE of a row without keys");
  join_sink(-kInfinity, factor = 0.f, lse = -kInfinity);
  check_equal(factor, 0.f, "factor of a row without keys, sink -infinity");
  check_equal(lse, -kInfinity, "LSE of a row without keys, sink -infinity");
  join_sink(-kInfinity, factor = 0.3f, lse = -1.7f);
  check_equal(factor, 0.3f, "factor where the sink is -infinity");
  check_equal(lse, -1.7f, "LSE where the sink is -infinity");
  join_sink(1.f, factor = 0.3f, lse = NAN);
  check(std::isnan(lse), "LSE that is NaN");
  check(std::isnan(factor), "factor of a row whose LSE is NaN");
}

}  // namespace
}  // namespace cute_attention

int main() {
  float const logits[] = {-1e30f, -1e4f, -200.f, -3.f, 0.f, 1e-3f, 0.5f, 11.f, 88.f, 300.f, 1e4f};
  for (float const lse : logits) {
    for (float const sink : logits) {
      cute_attention::check_row(lse, sink);
    }
  }
  cute_attention::check_special_rows();
  return cute_attention::testing::report();
}
