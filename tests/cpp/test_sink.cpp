// test_sink.cpp: a sink that joins a row, against the softmax with one more logit in double.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

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

// The threads of a CTA take each row of a head once, and no other number.
void check_rows_of_a_head(int32_t sequences, int32_t rows, int32_t heads, int32_t threads) {
  std::string const what = std::to_string(sequences) + " x " + std::to_string(rows) + " rows of " +
                           std::to_string(heads) + " heads, " + std::to_string(threads) +
                           " threads";
  std::vector<int> taken(sequences * heads * rows), expected(taken.size());
  for (int32_t thread = 0; thread < threads; ++thread) {
    HeadRows walk(sequences, rows, int64_t(heads) * rows, threads, thread);
    for (; walk.inside(); walk.advance()) {
      ++taken.at(walk.place());
    }
  }
  for (int32_t sequence = 0; sequence < sequences; ++sequence) {
    for (int32_t row = 0; row < rows; ++row) {
      expected[sequence * heads * rows + row] = 1;
    }
  }
  check(taken == expected, what);
}

// Past 2^31 rows: the last one of the last thread.
void check_many_rows() {
  constexpr int32_t kRows = 1 << 30, kSequences = 5;
  HeadRows walk(kSequences, kRows, int64_t(3) * kRows, 128, 127);
  walk.sequence = kSequences - 1;
  walk.row = kRows - 1;
  check(walk.inside(), "the last row is inside");
  check_equal(walk.place(), int64_t(kSequences - 1) * 3 * kRows + kRows - 1,
              "the last row's place");
  walk.advance();
  check(!walk.inside(), "there is no row after the last");
}

// One CTA of each head writes the gradient, and it is the head's first where tiles are taken from
// the last to the first.
void check_who_writes(int32_t batch, int32_t heads, int32_t seqlen_q) {
  constexpr int32_t kTileM = 64;
  BackwardParams params{};
  float gradient;
  params.batch = batch;
  params.heads = heads;
  params.seqlen_q = seqlen_q;
  std::vector<int> tiles(heads), writers(heads);
  for (int64_t index = work_tiles(params, kTileM) - 1; index >= 0; --index) {
    WorkTile const work = work_tile(params, kTileM, int32_t(index));
    params.grad_sink = nullptr;
    check(!writes_sink_gradient(params, work), "nobody writes what is not wanted");
    params.grad_sink = &gradient;
    if (writes_sink_gradient(params, work)) {
      ++writers[work.head];
      check_equal(tiles[work.head], 0, "tiles of the head before the one that writes");
    }
    ++tiles[work.head];
  }
  check(writers == std::vector<int>(heads, 1), "one CTA of each head writes");
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
  for (int32_t const rows : {0, 1, 2, 16, 127, 128, 129, 300}) {
    for (int32_t const sequences : {1, 2, 5, 300}) {
      for (int32_t const threads : {128, 256}) {
        cute_attention::check_rows_of_a_head(sequences, rows, 3, threads);
      }
    }
  }
  cute_attention::check_many_rows();
  cute_attention::check_who_writes(1, 1, 1);
  cute_attention::check_who_writes(3, 4, 300);
  return cute_attention::testing::report();
}
