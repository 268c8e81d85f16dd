// softmax_walk.h: the kernels' walks over tiles of scores, in an emulated warp: which functions of
// the softmax they call, and when the output takes what in.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "cute_attention/core/optimistic_softmax.h"
#include "host_warp.h"
#include "softmax_problem.h"

namespace cute_attention::testing {

// What a walk computed, and how. The tiles are counted once for the warp.
struct Walked {
  std::vector<RowResult> rows;
  int optimistic = 0;  // tiles that were taken without a maximum of their own
  int rescaled = 0;    // ... and outgrew the references
  int lost = 0;        // ... and had to be made again
  int updated = 0;     // tiles with new references from update()

  bool operator==(Walked const& other) const {
    return rows == other.rows && optimistic == other.optimistic && rescaled == other.rescaled &&
           lost == other.lost && updated == other.updated;
  }
};

// What the kernels' rows differ in.
template <class Element_, int kRows_, int kLag_, int kChains_ = 1>
struct Variant {
  using Element = Element_;             // P is rounded to
  static constexpr int kRows = kRows_;  // of a thread
  static constexpr int kLag = kLag_;
  static constexpr int kChains = kChains_;
};

template <class Variant>
class Walk {
 public:
  static constexpr int kRows = Variant::kRows;
  static constexpr int kWarpRows = 8 * kRows;  // of all threads
  using Softmax = OptimisticSoftmax<kRows, Variant::kLag, HostWarp>;
  using Rows = typename Softmax::Rows;

  // As the sm90 kernel: the output takes the probabilities of a tile in, and the normaliser their
  // sums, while those of the next are made.
  static Walked as_sm90(Problem const& problem) {
    return Walk(problem).run([](Lane& lane) { lane.walk_sm90(); });
  }

  // As the sm80 kernel: tile by tile, with the same function of the softmax for both ways.
  static Walked as_sm80(Problem const& problem) {
    return Walk(problem).run([](Lane& lane) { lane.walk_sm80(); });
  }

 private:
  using Element = typename Variant::Element;
  // The scores of a thread: pairs of columns, eight apart, in rows eight apart.
  using Scores = decltype(cute::make_tensor<float>(
      cute::Shape<cute::Int<kRows>, cute::Int<kColumns / kThreadsPerRow>>{}));
  using Output = decltype(cute::make_tensor<float>(
      cute::Shape<cute::Int<kRows>, cute::Int<kHeadDim / kThreadsPerRow>>{}));

  explicit Walk(Problem const& problem) : problem_(problem) {
    if (problem.rows != kWarpRows) throw std::logic_error("rows of another warp");
    walked_.rows.resize(kWarpRows);
  }

  struct Lane {
    Walk& walk;
    int const lane;
    Softmax softmax;
    Scores scores;  // then probabilities
    Output output;
    Rows factors;

    Lane(Walk& walk, int lane) : walk(walk), lane(lane), softmax(walk.problem_.scale) {
      cute::clear(output);
    }

    int row(int i) const { return lane / kThreadsPerRow + 8 * i; }
    int column(int i) const { return 2 * (lane % kThreadsPerRow) + i % 2 + 8 * (i / 2); }
    auto is_query() const {
      return [this](int i) { return walk.problem_.query[row(i)] != 0; };
    }
    static auto alone() {
      return [](Rows&) {};
    }

    void walk_sm90() {
      Problem const& problem = walk.problem_;
      make_scores(0);
      note(softmax.take(scores, factors, alone(), is_query()));
      store_probabilities(0);
      for (int tile = 1; tile < problem.tiles; ++tile) {
        normalise(tile - 1);
        make_scores(tile);
        bool const optimistic = !problem.masked[tile] && softmax.is_ready();
        Outcome outcome =
            optimistic ? softmax.template take_optimistically<Variant::kChains>(scores, factors,
                                                                                is_query())
                       : softmax.take(scores, factors, alone(), is_query());
        note(outcome, optimistic);
        accumulate(tile - 1);
        if (outcome == Outcome::Lost) {
          make_scores(tile);
          outcome = softmax.retake(scores, factors, alone(), is_query());
          note(outcome);
        }
        store_probabilities(tile);
        if (outcome == Outcome::Rescale) scale_rows(output, factors);
      }
      normalise(problem.tiles - 1);
      accumulate(problem.tiles - 1);
      finish();
    }

    void walk_sm80() {
      Problem const& problem = walk.problem_;
      for (int tile = 0; tile < problem.tiles; ++tile) {
        bool const masked = tile == 0 || problem.masked[tile];
        Rows sums;
        for (bool exact = masked || !softmax.is_ready();; exact = true) {
          make_scores(tile);
          bool within = true;
          if (exact) {
            Rows base;
            cute::fill(base, NAN);
            bool const rescale = softmax.update(scores, factors, base, alone(), is_query());
            note(rescale ? Outcome::Rescale : Outcome::Done);
            if (rescale) scale_rows(output, factors);
            sums = softmax.exponentiate(scores, base);
          } else {
            sums = softmax.exponentiate(scores, softmax.base());
            within = !softmax.outgrown(sums);
            note(within ? Outcome::Done : Outcome::Lost, true);
          }
          if (within) break;
          softmax.lost_once = true;
        }
        softmax.add(sums);
        store_probabilities(tile);
        accumulate(tile);
        normalise(tile);
      }
      finish();
    }

    // What the softmax is to write holds garbage before it does.
    void make_scores(int tile) {
      for (int i = 0; i < kRows; ++i) {
        factors(i) = NAN;
        for (int j = 0; j < kColumns / kThreadsPerRow; ++j) {
          scores(i, j) = walk.problem_.at(tile, row(i), column(j));
        }
      }
    }

    // P as rounded, for all threads. There is room for two tiles: one is read while the next is
    // written.
    void store_probabilities(int tile) {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kColumns / kThreadsPerRow; ++j) {
          walk.probability(tile, row(i), column(j)) = float(Element(scores(i, j)));
        }
      }
      HostWarp::all(true);  // another collective than those of the softmax: those cannot pass for it
    }

    // What RowSums does with tensor cores.
    void normalise(int tile) {
      softmax.normalise_by([&](int i) {
        float sum = 0;
        for (int j = 0; j < kColumns; ++j) sum += walk.probability(tile, row(i), j);
        return sum;
      });
    }

    // O += P V
    void accumulate(int tile) {
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kHeadDim / kThreadsPerRow; ++j) {
          for (int key = 0; key < kColumns; ++key) {
            output(i, j) +=
                walk.probability(tile, row(i), key) * walk.value(tile * kColumns + key, column(j));
          }
        }
      }
    }

    void finish() {
      Rows lse;
      cute::fill(lse, NAN);
      scale_rows(output, softmax.finish(lse, alone()));
      for (int i = 0; i < kRows; ++i) {
        RowResult& result = walk.walked_.rows[row(i)];
        for (int j = 0; j < kHeadDim / kThreadsPerRow; ++j) result.output[column(j)] = output(i, j);
        walk.lse_[lane % kThreadsPerRow][row(i)] = lse(i);
      }
    }

    // All lanes go through the same outcomes; the first one's are counted.
    void note(Outcome outcome, bool optimistic = false) {
      if (lane == 0) walk.outcomes_.push_back(outcome);
      int const index = noted_++;
      walk.disagreed_ += index >= int(walk.outcomes_.size()) || walk.outcomes_[index] != outcome;
      if (lane > 0) return;
      walk.walked_.optimistic += optimistic;
      walk.walked_.lost += outcome == Outcome::Lost;
      (optimistic ? walk.walked_.rescaled : walk.walked_.updated) += outcome == Outcome::Rescale;
    }

    int noted_ = 0;
  };

  template <class Way>
  Walked run(Way const& way) {
    for (int key = 0; key < problem_.keys(); ++key) {
      for (int column = 0; column < kHeadDim; ++column) values_.push_back(value_of(key, column));
    }
    run_warp(
        [&](int index) {
          Lane lane(*this, index);
          way(lane);
        },
        "a walk over tiles");
    check_equal(disagreed_, 0, "lanes disagree on the outcomes of tiles");
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
    return probabilities_[tile % 2][row][column];
  }
  float value(int key, int column) const { return values_[key * kHeadDim + column]; }

  Problem const& problem_;
  Walked walked_;
  std::vector<float> values_;
  std::vector<Outcome> outcomes_;
  float probabilities_[2][kWarpRows][kColumns];
  float lse_[kThreadsPerRow][kWarpRows];
  int disagreed_ = 0;
};

}  // namespace cute_attention::testing
