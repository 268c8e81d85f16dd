// test_key_splits.cpp: the splits of a row of queries visit each of its KV tiles once, their places
// in the workspace do not overlap, and what they have found combines to what one CTA would find.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cute_attention/core/combine_splits.h"
#include "cute_attention/core/query_packing.h"
#include "cute_attention/core/split_steps.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Every tile that a tile of queries needs is in exactly one split, with the mask that it has there
// without splits, and no split has a tile more than another plus one.
int check_tiles(KvTiles const& all, int splits) {
  std::map<int, int> visits;
  int fewest = INT32_MAX, most = 0, previous = all.begin;
  for (int split = 0; split < splits; ++split) {
    KvTiles const own = split_tiles(all, split, splits);
    check_equal(own.begin, previous, "a split begins where the one before ends");
    check(own.begin <= own.end, "the tiles of a split");
    previous = own.end;
    for (int tile = own.begin; tile < own.end; ++tile) {
      ++visits[tile];
      check_equal(own.masked(tile), all.masked(tile), "the mask of a tile");
    }
    fewest = std::min(fewest, own.end - own.begin);
    most = std::max(most, own.end - own.begin);
  }
  check_equal(previous, all.end, "the last split ends with the last tile");
  check(most - fewest <= 1, "even splits");
  for (int tile = all.begin; tile < all.end; ++tile) check_equal(visits[tile], 1, "a tile");
  check_equal(int(visits.size()), all.end - all.begin, "no other tile");
  return int(visits.size());
}

void test_tiles() {
  int const windows[] = {0, 1, 5, 30, kUnbounded};
  int visited = 0;
  for (int seqlen_q : {1, 7, 13}) {
    for (int seqlen_k : {0, 1, 16, 50}) {
      for (int left : windows) {
        for (int right : windows) {
          Sequence const sequence = make_sequence(seqlen_q, seqlen_k, 0, 0, left, right);
          for (int m_begin = 0; m_begin < seqlen_q; m_begin += 4) {
            KvTiles const all = kv_tiles(sequence, m_begin, 4, 3);
            for (int splits : {1, 2, 3, 7, 64, kMostSplits}) visited += check_tiles(all, splits);
          }
        }
      }
    }
  }
  check(visited > 10000, "the world is not empty");
  // The most tiles that a sequence has, in the most splits: no number overflows.
  int const tiles = ceil_div(kMaxSeqlen, 8);
  KvTiles const last = split_tiles({0, 0, tiles, tiles}, kMostSplits - 1, kMostSplits);
  check_equal(last.end, tiles, "the last tile of the longest sequence");
}

// A warpgroup of sm90 leaves out at most the last tile of its split, and no tile that it needs.
void test_tiles_of_a_warpgroup() {
  for (int seqlen_k : {5, 17, 40}) {
    for (int right : {0, 2, 9}) {
      Sequence const sequence = make_sequence(8, seqlen_k, 0, 0, kUnbounded, right);
      KvTiles const all = kv_tiles(sequence, 0, 8, 3), own = kv_tiles(sequence, 0, 4, 3);
      for (int splits : {1, 2, 5, 20}) {
        for (int split = 0; split < splits; ++split) {
          KvTiles const of_split = split_tiles(all, split, splits);
          KvTiles const visited = visited_tiles(of_split, own);
          check_equal(visited.begin, of_split.begin, "it visits the first tile of the split");
          check(visited.end >= of_split.end - 1 && visited.end >= std::min(own.end, of_split.end),
                "it leaves out no tile that it needs");
          check(of_split.begin == of_split.end || visited.begin < visited.end, "it visits a tile");
        }
      }
    }
  }
}

void test_workspace() {
  ForwardParams params{};
  params.batch = 2;
  params.heads = 3;
  params.seqlen_q = 5;
  params.head_dim_v = 24;
  params.num_splits = 4;
  for (bool const packed : {false, true}) {
    if (packed) {
      params.cu_seqlens_q = params.cu_seqlens_k = reinterpret_cast<int32_t const*>(16);
      params.total_q = 9;
    }
    int64_t const rows = lse_size(params);
    check_equal(rows, packed ? 27 : 30, "rows");
    std::vector<float> workspace(split_workspace_size(params, params.num_splits), 0.f);
    params.split_workspace = workspace.data();
    for (int split = 0; split < params.num_splits; ++split) {
      for (int64_t row = 0; row < rows; ++row) {
        for (int col = 0; col < params.head_dim_v; ++col) {
          split_output(params, split, row)[col] += 1;
        }
        SplitSum& sum = *split_sum(params, split, row);
        sum = {sum.base + 1, sum.sum + 1};
      }
    }
    check(std::all_of(workspace.begin(), workspace.end(), [](float x) { return x == 1; }),
          "every number of the workspace has one owner");
  }
}

// The largest workspace: its size and places do not overflow.
void test_large_workspace() {
  ForwardParams params{};
  params.batch = 1;
  params.heads = 2;
  params.seqlen_q = kMaxSeqlen;
  params.head_dim_v = 256;
  params.num_splits = kMostSplits;
  int64_t const rows = 2 * int64_t(kMaxSeqlen);
  check_equal(split_workspace_size(params, kMostSplits), 128 * rows * 258, "floats");
  params.split_workspace = reinterpret_cast<float*>(16);  // nothing is read
  auto const place = [&](void const* address) {
    return (reinterpret_cast<intptr_t>(address) - 16) / 4;
  };
  check_equal(place(split_output(params, 127, rows - 1)), (128 * rows - 1) * 256, "last output");
  check_equal(place(split_sum(params, 127, rows - 1)), 128 * rows * 256 + (128 * rows - 1) * 2,
              "last sum");
}

struct Part {
  SplitSum sum;
  double output;  // of one column
};

// What the kernel does with the splits of a row, one after the other.
struct Row {
  double output;
  float lse;
};
Row combine(std::vector<Part> const& parts, float const* sink, DropoutOptions const& dropout = {}) {
  float base = -kInfinity, sum = 0.f;
  for (Part const& part : parts) base = std::fmax(base, split_base(part.sum));
  double output = 0;
  for (Part const& part : parts) {
    float const weight = split_weight(part.sum, base);
    if (weight == kUnseen) continue;
    sum += weight * part.sum.sum;
    output += weight * part.output;
  }
  CombinedRow const row = combined_row(base, sum, sink, dropout);
  return {output * row.factor, row.lse};
}

// Splits of random sizes of a row of scores around `level`, in base 2; some see nothing.
void check_row(std::mt19937& random, double level, float const* sink) {
  std::normal_distribution<double> normal;
  std::vector<Part> parts;
  std::vector<double> scores, values;
  for (int split = 0; split < 5; ++split) {
    int const keys = int(random() % 4) * 10;
    if (keys == 0) {  // what lies there before is never read
      parts.push_back({{NAN, 0.f}, NAN});
      continue;
    }
    std::vector<double> own(keys);
    for (double& score : own) score = std::round((level + 3 * normal(random)) * 1024) / 1024;
    // Any score is a base that will do.
    float const base = float(own[random() % own.size()]);
    Part part{{base, 0.f}, 0};
    double sum = 0;
    for (double score : own) {
      double const value = normal(random), p = std::exp2(score - base);
      sum += p;
      part.output += p * value;
      scores.push_back(score);
      values.push_back(value);
    }
    part.sum.sum = float(sum);
    parts.push_back(part);
  }
  double most = sink == nullptr ? -INFINITY : *sink * M_LOG2E;
  for (double score : scores) most = std::max(most, score);
  double sum = sink == nullptr ? 0 : std::exp2(*sink * M_LOG2E - most), output = 0;
  for (size_t i = 0; i < scores.size(); ++i) {
    sum += std::exp2(scores[i] - most);
    output += std::exp2(scores[i] - most) * values[i];
  }
  Row const row = combine(parts, sink);
  if (scores.empty()) {
    check_equal(row.output, 0., "output of a row without keys");
    check_equal(row.lse, sink == nullptr ? -kInfinity : *sink, "LSE of a row without keys");
    return;
  }
  double const lse = (most + std::log2(sum)) * M_LN2;
  check(std::abs(row.output - output / sum) <= 3e-6,
        "output of a row around " + std::to_string(level));
  check(std::abs(row.lse - lse) <= 4e-7 * std::max(1., std::abs(lse)),
        "LSE of a row around " + std::to_string(level));
}

void test_rows() {
  std::mt19937 random(0);
  float const sinks[] = {0.f, -50.f, 40.f, -kInfinity};
  for (int i = 0; i < 200; ++i) {
    for (double level : {0., -120., 2000.}) {
      check_row(random, level, nullptr);
      for (float const& sink : sinks) check_row(random, level, &sink);
    }
  }
}

// Every split is a member's, and who combines a tile with few rows has time for all of them.
void test_teams() {
  for (int splits = 1; splits <= kMostSplits; ++splits) {
    int const team = team_size(splits);
    check(team <= kMostMembers && (team == kMostMembers || team * kSplitsOfStep >= splits),
          "a member reads its splits in a step, as long as there are members");
    check(team == 1 || team / 2 * kSplitsOfStep < splits, "no more members than needed");
    int steps = 0;
    for (int member = 0; member < team; ++member) {
      int const own = member < splits ? ceil_div(splits - member, team) : 0;
      steps += std::max(ceil_div(own, kSplitsOfStep), 1);
    }
    check(combine_steps(4, splits, 128) >= steps, "steps of " + std::to_string(splits) + " splits");
    check(!last_split_combines(4, splits, 128) || splits <= kMostOfLast,
          "a weight for each thread");
    check(!last_split_combines(64, splits, 128), "many rows");
  }
  check(last_split_combines(4, 16, 128) && last_split_combines(8, 8, 128), "a group of heads");
  check(!last_split_combines(8, 128, 128), "many splits");
  ForwardParams params{};
  params.cache.seqused_k = reinterpret_cast<int32_t const*>(16);
  KernelKey const key = kernel_key(Arch::Sm90, Direction::Forward, DType::Float16, 64, 64, 0);
  check(last_split_may_combine(key, params), "a cache on sm90");
  params.cu_seqlens_q = params.cache.seqused_k;
  check(!last_split_may_combine(key, params), "packed queries");
}

// Tiles of heads and their numbers belong together, so that no two tiles have one counter.
void test_numbers_of_tiles() {
  for (int group : {1, 3, 4, 6, 64, 80}) {
    for (int shift = 0; shift <= 6; ++shift) {
      QueryPacking const packing{shift, group, ceil_div(group, 1 << shift)};
      for (int index = 0; index < 5 * packing.parts; ++index) {
        check_equal(packing.index(packing.first_head(index)), index, "the number of a tile");
      }
    }
  }
}

void test_special_rows() {
  // Scores so far from 0 that an LSE would not show how many keys have them.
  for (float base : {-1e30f, 1e9f}) {
    Row const row = combine({{{base, 3.f}, 3.}, {{base, 1.f}, 5.}}, nullptr);
    check_equal(row.output, 2., "the mean of keys with equal huge scores");
    check_equal(row.lse, base * float(M_LN2), "LSE of huge scores");
  }
  // A split whose keys weigh nothing beside another's.
  Row const far = combine({{{5000.f, 2.f}, 8.}, {{-5000.f, 7.f}, 1e6}}, nullptr);
  check_equal(far.output, 4., "a split that weighs nothing");
  // NaN in a score of one split: in its sum, whatever its base.
  for (float base : {0.f, -kInfinity, NAN}) {
    Row const row = combine({{{2.f, 1.f}, 1.}, {{base, NAN}, NAN}}, nullptr);
    check(std::isnan(row.output) && std::isnan(row.lse), "NaN in one split");
    Row const only = combine({{{base, NAN}, NAN}, {{NAN, 0.f}, NAN}}, nullptr);
    check(std::isnan(only.output) && std::isnan(only.lse), "NaN in the only split with keys");
  }
  // NaN in a value alone.
  check(std::isnan(combine({{{0.f, 1.f}, NAN}, {{3.f, 1.f}, 1.}}, nullptr).output),
        "NaN in a value");
  check_equal(combine({{{3.f, 1.f}, NAN}, {{4.f, 1.f}, 1.}}, nullptr).lse,
              float((4 + std::log2(1.5)) * M_LN2), "LSE where a value is NaN");
  // Every query whose sums were dropped whole: output 0, and the LSE of its keys.
  Row const dropped = combine({{{1.f, 2.f}, 0.}, {{1.f, 2.f}, 0.}}, nullptr, {nullptr, 256});
  check_equal(dropped.output, 0., "dropout of everything");
  check_equal(dropped.lse, 3.f * float(M_LN2), "LSE of dropout of everything");
  Row const half = combine({{{1.f, 2.f}, 1.}, {{1.f, 2.f}, 2.}}, nullptr, {nullptr, 128});
  check_equal(half.output, 1.5, "the factor of dropout");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_tiles();
  test_tiles_of_a_warpgroup();
  test_workspace();
  test_large_workspace();
  test_rows();
  test_teams();
  test_numbers_of_tiles();
  test_special_rows();
  return testing::report();
}
