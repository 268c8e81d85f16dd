// test_every_modifier.cpp: a row of every combination, in calls that have any of softcap, ALiBi and
// a bias: what its modifiers make of each thread's scores, forward and backward, against the
// formulas in double.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <cute/atom/mma_atom.hpp>

#include "check.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/mask.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;
using namespace cute;

constexpr int kTileM = 64, kTileN = 64, kThreads = 128;
using Mma = decltype(make_tiled_mma(SM80_16x8x16_F32F16F16F32_TN{}, Layout<Shape<_4, _1, _1>>{}));
using Every = ScoreModifiers<score_mods::Every>;

constexpr int32_t kSeqlenQ = 120, kSeqlenK = 150, kBatch = 1, kHead = 2;
constexpr float kScale = 0.125f, kSoftcap = 20.f, kSlope = 0.25f, kLse = 3.f;
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Which of the three a call has.
struct Call {
  bool softcap, alibi, bias;

  float unit() const { return softcap ? kSoftcap : kScale; }
  std::string name() const {
    return std::string(softcap ? "softcap " : "") + (alibi ? "alibi " : "") + (bias ? "bias" : "");
  }
};

// A bias of one head. Under a causal mask it is NaN where the mask hides the key.
std::vector<float> biases() {
  std::vector<float> numbers(kSeqlenQ * kSeqlenK);
  for (int i = 0; i < kSeqlenQ; ++i) {
    for (int j = 0; j < kSeqlenK; ++j) {
      bool const hidden = j > i + kSeqlenK - kSeqlenQ;
      numbers[i * kSeqlenK + j] = hidden ? kNaN : float((i * 7 + j * 3) % 11) * 0.25f - 1;
    }
  }
  return numbers;
}

template <class Params>
Params params_of(Call const& call, float const* slopes, std::vector<float>& bias) {
  Params params{};
  params.seqlen_q = kSeqlenQ;
  params.seqlen_k = kSeqlenK;
  params.scale = kScale;
  params.softcap = call.softcap ? kSoftcap : 0.f;
  if (call.alibi) params.alibi_slopes = {slopes, 0, 1};
  if (call.bias) params.bias = {bias.data(), 0, 0, kSeqlenK, 1, 1};
  return params;
}

// What a map left of the score of a query and a key: below 1, as softcap has it.
float mapped(int query, int key) { return float((query * 5 + key * 13) % 17) / 32 - 0.25f; }

// The terms of a score.
double terms(Call const& call, std::vector<float> const& bias, int query, int key) {
  double sum = 0;
  if (call.alibi) sum -= kSlope * std::abs(query + kSeqlenK - kSeqlenQ - key);
  if (call.bias) sum += bias[query * kSeqlenK + key];
  return sum;
}

bool is_near(double value, double expected) {
  return std::abs(value - expected) <= 2e-5 * std::max(1., std::abs(expected));
}

template <class Tile>
int key_of(Tile const& tile, int row, int col) {
  return tile.first_key(row) + tile.keys_behind_first(row, col);
}

template <class Tile>
void fill_mapped(Tile const& tile) {
  for (int row = 0; row < Tile::kRows; ++row) {
    for (int col = 0; col < Tile::kCols; ++col) {
      tile.scores(row, col) = mapped(tile.query(row), key_of(tile, row, col));
    }
  }
}

void check_forward(Call const& call, int m_begin, int n_begin) {
  float const slopes[] = {9, 9, kSlope, 9};
  std::vector<float> bias = biases();
  auto const params = params_of<ForwardParams>(call, slopes, bias);
  check_equal(Every::exponent_scale(params), call.unit(), "unit, " + call.name());
  Sequence const sequence = make_sequence(kSeqlenQ, kSeqlenK, 0, 0, kUnbounded, 0);
  QueryPacking const packing = unpacked_queries();
  for (int thread = 0; thread < kThreads; ++thread) {
    auto scores = partition_fragment_C(Mma{}, Shape<Int<kTileM>, Int<kTileN>>{});
    auto const tile =
        make_score_tile<kTileM, kTileN>(Mma{}, thread, scores, sequence, packing, m_begin, n_begin);
    using Tile = std::decay_t<decltype(tile)>;
    fill_mapped(tile);
    Every::Terms::OfRows<Tile::kRows> rows;
    rows.load(params, kBatch, [](int) { return kHead; }, call.unit());
    Every::Terms::add<half_t>(params, tile, rows);
    mask_scores(tile);
    for (int row = 0; row < Tile::kRows; ++row) {
      for (int col = 0; col < Tile::kCols; ++col) {
        int const query = tile.query(row), key = key_of(tile, row, col);
        if (query >= kSeqlenQ) continue;
        double const exact =
            mapped(query, key) + terms(call, bias, query, key) / double(call.unit());
        bool const hidden = key > query + kSeqlenK - kSeqlenQ;
        check(hidden ? tile.scores(row, col) == -INFINITY : is_near(tile.scores(row, col), exact),
              call.name() + ": a score of the forward");
      }
    }
  }
}

// P and dS / (dP + delta) of copies of kRows x kCols scores after the other, as the backward takes
// them.
//   kFinite  of BackwardScores
template <bool kFinite, int kRows, int kCols, class Tile>
void check_copies(Call const& call, BackwardParams const& params, std::vector<float> const& bias,
                  Tile const& tile) {
  using Scores = BackwardScores<score_mods::Every, score_mods::None, kFinite>;
  static_assert(Scores::kModifiesCopies && !Scores::kTermsInExponent && !Scores::kMasksFirst);
  Scores const scores(params);
  auto const head = Scores::of_head(params, kBatch, kHead);
  fill_mapped(tile);
  for (int row = 0; row < Tile::kRows; row += kRows) {
    for (int col = 0; col < Tile::kCols; col += kCols) {
      Tensor copies = make_tensor<float>(Int<kRows * kCols>{});  // (8)
      auto const part = copies_of_scores<kRows, kCols>(tile, row, col, copies);
      Scores::template add_terms<half_t>(params, head, part);
      mask_scores_by_side(part);
      for (int i = 0; i < kRows; ++i) {
        for (int j = 0; j < kCols; ++j) {
          int const query = tile.query(row + i), key = key_of(tile, row + i, col + j);
          check_equal(part.query(i), query, "the query of a copy");
          check_equal(key_of(part, i, j), key, "the key of a copy");
          if (query >= kSeqlenQ) continue;
          float probability = tile.scores(row + i, col + j);
          float const factor = scores.factor(probability, part.scores(i, j), kLse);
          bool const hidden = key > query + kSeqlenK - kSeqlenQ;
          double const y = mapped(query, key);
          double const score = call.unit() * y + terms(call, bias, query, key);
          double const exact = hidden ? 0 : std::exp2(score * M_LOG2E - kLse);
          check(is_near(probability, exact), call.name() + ": P of the backward");
          check(is_near(factor, exact * (call.softcap ? 1 - y * y : 1)),
                call.name() + ": what dP is multiplied with");
        }
      }
    }
  }
}

void check_backward(Call const& call, int m_begin, int n_begin) {
  float const slopes[] = {9, 9, kSlope, 9};
  std::vector<float> bias = biases();
  auto const params = params_of<BackwardParams>(call, slopes, bias);
  Sequence const sequence = make_sequence(kSeqlenQ, kSeqlenK, 0, 0, kUnbounded, 0);
  QueryPacking const packing = unpacked_queries();
  for (int thread = 0; thread < kThreads; ++thread) {
    auto scores = partition_fragment_C(Mma{}, Shape<Int<kTileM>, Int<kTileN>>{});
    check_copies<false, 2, 4>(call, params, bias,
                              make_score_tile<kTileM, kTileN>(Mma{}, thread, scores, sequence,
                                                              packing, m_begin, n_begin));
    auto transposed = partition_fragment_C(Mma{}, Shape<Int<kTileN>, Int<kTileM>>{});
    check_copies<true, 4, 2>(call, params, bias,
                             make_score_tile_of_transpose<kTileM, kTileN>(
                                 Mma{}, thread, transposed, sequence, packing, m_begin, n_begin));
  }
}

// Rows whose set is any other have no branches, and none of their features may be absent.
void check_sets() {
  static_assert(serves_subsets(score_mods::Every) && required_features(score_mods::Every) == 0);
  for (uint32_t set = 0; set < score_mods::Every; ++set) {
    if ((set & ~score_mods::Every) == 0) {
      check_equal(required_features(set), set, "what a row demands");
    }
  }
  constexpr uint32_t kBoth = score_mods::Alibi | score_mods::Bias;
  using Two = ScoreModifiers<kBoth>;
  static_assert(std::is_same_v<Two::Terms, SumOfTerms<AlibiTerm, BiasTerm>>);
  using Capped = ScoreModifiers<score_mods::Every, score_mods::Bias>;
  static_assert(std::is_same_v<Capped::Terms, OptionalTerm<AlibiTermOf<false>>> && Capped::kHasMap);
  using Later = ScoreModifiers<score_mods::Every, score_mods::Softcap | score_mods::Bias>;
  static_assert(!Later::kHasMap && Later::kHasTerm);
  BackwardParams params{};
  static_assert(call_has<kBoth, score_mods::Bias>(BackwardParams{}));
  static_assert(!call_has<kBoth, score_mods::Dropout>(BackwardParams{}));
  check(!call_has<score_mods::Every, score_mods::Dropout>(params), "no dropout");
  uint64_t const seed = 1;
  params.dropout = {&seed, 0};
  check(call_has<score_mods::Every, score_mods::Dropout>(params), "dropout that drops nothing");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_sets();
  for (int set = 0; set < 8; ++set) {
    Call const call{(set & 1) != 0, (set & 2) != 0, (set & 4) != 0};
    for (int m_begin : {0, 64}) {
      for (int n_begin : {0, 64, 128}) {
        check_forward(call, m_begin, n_begin);
        check_backward(call, m_begin, n_begin);
      }
    }
  }
  return testing::report();
}
