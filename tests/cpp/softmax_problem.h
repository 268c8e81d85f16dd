// softmax_problem.h: the scores of a few rows, in tiles; their exact softmax and output in float64;
// and bounds for the error of the softmax that the kernels compute.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace cute_attention::testing {

constexpr int kColumns = 32;  // keys of a tile
constexpr int kHeadDim = 8;   // columns of V and of the output

// A number between 0 and 1 that depends on every bit of `value`.
inline double mixed(uint64_t value) {
  value = (value + 1) * 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return double((value ^ value >> 31) >> 11) * 0x1p-53;
}

// An element of V, between -1 and 1. All problems have the same V.
inline float value_of(int key, int column) {
  return float(2 * mixed(uint64_t(key) * kHeadDim + column) - 1);
}

struct Problem {
  int rows;
  int tiles;  // numbered in the order in which the kernel visits them
  float scale;
  std::vector<float> scores;  // [tiles, rows, kColumns]
  std::vector<char> masked;   // [tiles]: whether the kernel treats the tile as one with a mask
  std::vector<char> query;    // [rows]: whether the row belongs to a query

  Problem(int rows, int tiles, float scale)
      : rows(rows),
        tiles(tiles),
        scale(scale),
        scores(size_t(tiles) * rows * kColumns, 0.f),
        masked(tiles, 0),
        query(rows, 1) {}

  float& at(int tile, int row, int column) {
    return scores[(size_t(tile) * rows + row) * kColumns + column];
  }
  float at(int tile, int row, int column) const {
    return scores[(size_t(tile) * rows + row) * kColumns + column];
  }
  int keys() const { return tiles * kColumns; }
  float key(int row, int key) const { return at(key / kColumns, row, key % kColumns); }
};

struct RowResult {
  float output[kHeadDim];
  float lse;

  // Compares the bits. Every NaN is equal to every other NaN.
  bool operator==(RowResult const& other) const {
    for (int i = 0; i < kHeadDim; ++i) {
      if (!same(output[i], other.output[i])) return false;
    }
    return same(lse, other.lse);
  }

 private:
  static bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(a)) == 0;
  }
};

// The exact answer for a row, and bounds for the errors of an answer computed from fp32 scores.
struct ExactRow {
  double output[kHeadDim];
  double lse;
  double output_error[kHeadDim];
  double lse_error;
};

// The answer for a row of a kernel whose probabilities have 16 bits. `unit` is half the distance
// from 1 to the next 16-bit number, `smallest` half of the smallest positive one.
inline ExactRow exact_row(Problem const& problem, int row, double unit, double smallest) {
  constexpr double kUnit = 0x1p-24;  // of fp32
  double const infinity = std::numeric_limits<double>::infinity();
  ExactRow exact{};
  double largest = -infinity;
  for (int key = 0; key < problem.keys(); ++key) {
    double const score = double(problem.key(row, key)) * problem.scale;
    largest = std::isnan(score) ? score : std::isnan(largest) ? largest : std::max(largest, score);
  }
  exact.lse = largest;
  if (largest == -infinity || std::isnan(largest)) {
    std::fill_n(exact.output, kHeadDim, largest == -infinity ? 0. : largest);
    return exact;  // the errors stay 0: nothing is rounded here
  }
  std::vector<double> weights(problem.keys());
  double sum = 0;
  for (int key = 0; key < problem.keys(); ++key) {
    weights[key] = std::exp(double(problem.key(row, key)) * problem.scale - largest);
    sum += weights[key];
  }
  exact.lse += std::log(sum);
  // The errors of the exponents, which are in base 2. The product of score and scale is rounded,
  // and so is its difference from the reference of the row; a difference of 150 or more has no
  // weight. The softmax subtracts a large reference from the scores first, without an error: it
  // does so beyond 2^13, and this bound counts on it beyond 2^20. Each further tile may multiply
  // what the earlier ones gave by one more factor, which has a rounding of its own. The sums run
  // over all keys.
  double const base = std::abs(largest) * M_LOG2E;
  double const exponent = 150 + (base > 0x1p20 ? 0 : base);
  double const fp32 = 2 * exponent * kUnit + (4 * problem.tiles + problem.keys() / 4) * kUnit;
  exact.lse_error = fp32 + 4 * std::abs(exact.lse) * kUnit;
  for (int column = 0; column < kHeadDim; ++column) {
    double output = 0;
    for (int key = 0; key < problem.keys(); ++key) {
      output += weights[key] / sum * value_of(key, column);
    }
    // A probability that is rounded to 16 bits changes the output by a part of its share of V. This
    // does not hold for a probability that is more than half of the sum. Its score must be the
    // reference, so it is 1, except for the error of its exponent.
    double rounded = 0;
    double all = 0;
    for (int key = 0; key < problem.keys(); ++key) {
      double const share = weights[key] / sum * std::abs(value_of(key, column));
      rounded += weights[key] > sum / 2 ? 0 : share;
      all += share;
    }
    exact.output[column] = output;
    exact.output_error[column] =
        rounded * unit + all * fp32 + problem.keys() * (smallest + kUnit) + 8 * kUnit;
  }
  return exact;
}

}  // namespace cute_attention::testing
