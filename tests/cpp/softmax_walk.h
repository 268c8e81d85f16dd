// softmax_walk.h: walks over tiles of scores, as the kernels do, in an emulated warp. A walk calls
// the functions of the softmax, scales the output and adds P V to it in the order of the kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "cute_attention/core/online_softmax.h"
#include "cute_attention/core/straight_softmax.h"
#include "host_warp.h"
#include "softmax_problem.h"

namespace cute_attention::testing {

// What a walk computed, and in how many of its tiles the reference of a row was replaced.
struct Walked {
  std::vector<RowResult> rows;
  int tiles = 0;
  int rescaled = 0;
};

// The emulated warp, with the integer instructions that the softmax needs too.
struct SoftmaxWarp : HostWarp {
  static int max3(int a, int b, int c) { return std::max(a, std::max(b, c)); }
  static int min3(int a, int b, int c) { return std::min(a, std::min(b, c)); }
};

// What the walks of different kernels differ in: the type that P is rounded to, the rows that a
// thread holds, and the softmax.
//
// sm80, and sm90 where warpgroups take no turns: P V of a tile is added to the output before the
// softmax of the next tile has ended, which says whether the output must be multiplied by factors.
//
// kLacks: the scores lack a number of their row and tile, which the softmax is told, as where the
// tensor cores compute ALiBi.
template <class Element_, int kRows_, int kMostLag = 14, bool kLacks_ = false>
struct Online {
  using Element = Element_;
  static constexpr int kRows = kRows_;
  static constexpr bool kLags = kMostLag > 0;  // whether a maximum may exceed the reference
  static constexpr bool kStraight = false;
  static constexpr bool kLacks = kLacks_;
  using Softmax = OnlineSoftmax<kRows, kMostLag, SoftmaxWarp>;
};

// sm90 with turns: P V of a tile is added to the output after the scores of the next tile are
// there, and before its softmax, which always multiplies the output by factors.
//
//   kRowByRow   exponentials row after row
//   kByMinimum  of raise()
template <class Element_, bool kRowByRow_ = false, bool kByMinimum_ = false>
struct Straight {
  using Element = Element_;
  static constexpr int kRows = 2;
  static constexpr bool kLags = false;
  static constexpr bool kStraight = true;
  static constexpr bool kLacks = false;
  static constexpr bool kRowByRow = kRowByRow_;
  static constexpr bool kByMinimum = kByMinimum_;
  using Softmax = StraightSoftmax<kRows, SoftmaxWarp>;
};

template <class Variant>
class Walk {
 public:
  static constexpr int kRows = Variant::kRows;
  static constexpr int kWarpRows = 8 * kRows;  // rows that all threads of the warp hold together

  static Walked alone(Problem const& problem) { return Walk(problem, 1, 0).run(); }

  // Two warps have the same rows. One of them takes the even tiles and the other, at the same time,
  // the odd ones. They exchange the maxima and the sums of the rows, and their outputs are added.
  // The emulation runs them one after the other, and the first one twice: it needs the sums of the
  // other.
  static Walked shared(Problem const& problem) {
    Walk even(problem, 2, 0);
    Walk odd(problem, 2, 1);
    even.run();  // only for its sums
    odd.others_sums_ = even.sums_;
    Walked result = odd.run();
    Walk again(problem, 2, 0);
    again.others_sums_ = odd.sums_;
    Walked const half = again.run();
    for (int row = 0; row < kWarpRows; ++row) {
      for (int i = 0; i < kHeadDim; ++i) result.rows[row].output[i] += half.rows[row].output[i];
    }
    return result;
  }

 private:
  using Element = typename Variant::Element;
  using Softmax = typename Variant::Softmax;
  using Rows = typename Softmax::Rows;
  template <int kCols>
  using Tile =
      decltype(cute::make_tensor<float>(cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));

  Walk(Problem const& problem, int warps, int warp)
      : problem_(problem), warps_(warps), warp_(warp) {
    if (problem.rows != kWarpRows) throw std::logic_error("rows of another warp");
    if (problem.tiles % warps != 0) throw std::logic_error("not a tile for each warp");
    walked_.rows.resize(kWarpRows);
    for (int key = 0; key < problem_.keys(); ++key) {
      for (int column = 0; column < kHeadDim; ++column) values_.push_back(value_of(key, column));
    }
  }

  // A thread of the warp. The rows that it holds are eight apart, and so are its pairs of columns.
  struct Lane {
    Walk& walk;
    int const lane;
    Softmax softmax;
    Tile<kColumns / kThreadsPerRow> scores;
    Tile<kColumns / kThreadsPerRow> probabilities;
    Tile<kHeadDim / kThreadsPerRow> output;
    Rows factors;
    int tile = 0;
    int steps = 0;

    Lane(Walk& walk, int lane) : walk(walk), lane(lane), softmax(walk.problem_.scale) {
      cute::clear(output);
    }

    int row(int i) const { return lane / kThreadsPerRow + 8 * i; }
    int column(int i) const { return 2 * (lane % kThreadsPerRow) + i % 2 + 8 * (i / 2); }

    // Everything that the softmax shall write is NaN before, so that what it fails to write does
    // harm.
    void run() {
      for (tile = walk.warp_; tile < walk.problem_.tiles; tile += walk.warps_) {
        cute::fill(factors, NAN);
        cute::fill(probabilities, NAN);
        load_scores();
        if constexpr (Variant::kStraight) {
          visit_straight();
        } else {
          visit_online();
        }
      }
      if constexpr (Variant::kStraight) accumulate(walk.problem_.tiles - 1);
      finish();
    }

    void load_scores() {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kColumns / kThreadsPerRow; ++j) {
          scores(i, j) = walk.problem_.at(tile, row(i), column(j)) - lacked(i);
        }
      }
    }

    // What the scores of this thread's row `i` lack in this tile.
    float lacked(int i) const {
      return Variant::kLacks ? float((tile * 5 + row(i) * 3) % 16 - 8) : 0.f;
    }

    // A KV tile of Online.
    void visit_online() {
      bool const rescale = walk.problem_.masked[tile] ? take<true>() : take<false>();
      note(rescale);
      cute::copy(scores, probabilities);
      store_probabilities();
      if (rescale) scale_rows(output, factors);
      accumulate(tile);
    }

    template <bool kMasked>
    bool take() {
      if constexpr (Variant::kLacks) {
        Rows offsets;
        for (int i = 0; i < kRows; ++i) offsets(i) = lacked(i);
        return softmax.template take<kMasked>(scores, factors, combine(), offsets);
      } else {
        return softmax.template take<kMasked>(scores, factors, combine());
      }
    }

    // A KV tile of Straight.
    void visit_straight() {
      Rows bases, sums;
      cute::fill(bases, NAN);
      cute::fill(sums, NAN);
      if (tile > 0) accumulate(tile - 1);
      softmax.template raise<Variant::kByMinimum>(softmax.maxima(scores), bases, factors);
      if (tile > 0) scale_rows(output, factors);
      bool rises = false;
      for (int i = 0; i < kRows; ++i) rises |= factors(i) != 1.f;
      note(SoftmaxWarp::any(rises));
      exponentiate(bases, sums);
      if (softmax.any_unusual(bases)) {
        softmax.lower(scores, bases);
        exponentiate(bases, sums);
      }
      softmax.add(sums);
      store_probabilities();
    }

    void exponentiate(Rows const& bases, Rows& sums) {
      if constexpr (Variant::kRowByRow) {
        softmax.exponentiate_rows(scores, bases, probabilities, sums);
      } else {
        softmax.exponentiate(scores, bases, probabilities, sums);
      }
    }

    // Combines a number of each row with that of the other warp: the maxima of its tile, and at the
    // end its sums.
    auto combine() {
      return [this](Rows& rows, auto const& op) {
        bool const sums = std::is_same_v<std::decay_t<decltype(op)>, SumOp>;
        for (int i = 0; i < kRows; ++i) {
          if (sums) walk.sums_[row(i)] = rows(i);
          if (walk.warps_ == 1) continue;
          float const other = sums ? walk.others_sums_[row(i)] : walk.maximum(tile ^ 1, row(i));
          rows(i) = op(rows(i), other);
        }
      };
    }

    // Rounds P and stores it where all threads can read it. There is room for two tiles, so that
    // one can be read while the next is written.
    void store_probabilities() {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kColumns / kThreadsPerRow; ++j) {
          walk.probability(tile, row(i), column(j)) = float(Element(probabilities(i, j)));
        }
      }
      HostWarp::all(true);  // the softmax never calls all(), so no collective of it can match this
    }

    // O += P V
    void accumulate(int of_tile) {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kHeadDim / kThreadsPerRow; ++j) {
          for (int key = 0; key < kColumns; ++key) {
            output(i, j) += walk.probability(of_tile, row(i), key) *
                            walk.values_[(of_tile * kColumns + key) * kHeadDim + column(j)];
          }
        }
      }
    }

    void finish() {
      Rows lse;
      cute::fill(lse, NAN);
      if constexpr (Variant::kStraight) {
        scale_rows(output, softmax.finish(lse));
      } else {
        scale_rows(output, softmax.finish(lse, combine()));
      }
      for (int i = 0; i < kRows; ++i) {
        RowResult& result = walk.walked_.rows[row(i)];
        for (int j = 0; j < kHeadDim / kThreadsPerRow; ++j) result.output[column(j)] = output(i, j);
        walk.lse_[lane % kThreadsPerRow][row(i)] = lse(i);
      }
    }

    // Counts a tile once for the whole warp, and checks that its lanes agree on whether references
    // were replaced.
    void note(bool rescale) {
      if (lane == 0) {
        ++walk.walked_.tiles;
        walk.walked_.rescaled += rescale;
        walk.outcomes_.push_back(rescale);
      }
      walk.disagreed_ += walk.outcomes_[steps++] != rescale;
    }
  };

  Walked run() {
    run_warp([&](int lane) { Lane(*this, lane).run(); }, "a walk over tiles");
    check_equal(disagreed_, 0, "lanes that disagree on whether to rescale");
    int unlike = 0;
    for (int row = 0; row < kWarpRows; ++row) {
      RowResult& result = walked_.rows[row];
      result.lse = lse_[0][row];
      RowResult other = result;
      for (auto const& lse : lse_) {
        other.lse = lse[row];
        unlike += !(other == result);
      }
    }
    check_equal(unlike, 0, "threads of a row that disagree on its LSE");
    return walked_;
  }

  float& probability(int tile, int row, int column) {
    return probabilities_[tile / warps_ % 2][row][column];
  }
  float maximum(int tile, int row) const {
    float result = -INFINITY;
    for (int column = 0; column < kColumns; ++column) {
      result = std::fmax(result, problem_.at(tile, row, column));
    }
    return result;
  }

  Problem const& problem_;
  int const warps_;  // how many warps have the same rows
  int const warp_;   // which of these warps this is
  Walked walked_;
  std::vector<float> values_;
  std::vector<bool> outcomes_;  // for each tile, what lane 0 noted
  std::array<float, kWarpRows> sums_{};
  std::array<float, kWarpRows> others_sums_{};
  float probabilities_[2][kWarpRows][kColumns];
  float lse_[kThreadsPerRow][kWarpRows];
  int disagreed_ = 0;
};

}  // namespace cute_attention::testing
