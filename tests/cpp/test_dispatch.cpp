// test_dispatch.cpp: which row is chosen, on tables of made-up rows: the rule of docs/design.md,
// written here once more, against what `candidates` marks and what `find_row` returns.
#include <algorithm>
#include <random>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "dispatch.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr int kRows = 160;
constexpr int kProblems = 1500;

std::mt19937& generator() {
  static std::mt19937 made(4);
  return made;
}

template <class T>
T one_of(std::initializer_list<T> values) {
  return values.begin()[generator()() % values.size()];
}

// Few values of each column, so that many rows have the same key, and some the same tiles too.
std::vector<KernelRow> made_up_rows() {
  static std::vector<std::string> names;
  for (int i = 0; i < kRows; ++i) names.push_back("row " + std::to_string(i));
  std::vector<KernelRow> rows;
  for (std::string const& name : names) {
    uint32_t const mods =
        one_of({score_mods::None, score_mods::None, score_mods::Softcap, score_mods::Alibi,
                score_mods::Bias, score_mods::Softcap | score_mods::Alibi, score_mods::Every,
                score_mods::Qv});
    uint32_t const features = mods | one_of<uint32_t>({0, 0, kSink});
    int32_t const head_dim = one_of({64, 128, 256});
    KernelKey const key{one_of({Arch::Sm80, Arch::Sm90}),
                        one_of({Direction::Forward, Direction::Backward}),
                        one_of({DType::Float16, DType::BFloat16}),
                        head_dim,
                        one_of({head_dim, head_dim, 128}),
                        mods,
                        features};
    KernelConfig const config{one_of({32, 64, 128}), one_of({64, 128}), 1, one_of({4, 12})};
    int32_t const shared_memory = one_of({48, 96, 160}) * 1024;
    rows.push_back({name.c_str(), key, config, config.warps * 32, shared_memory, nullptr, nullptr});
  }
  return rows;
}

DeviceInfo device(int32_t ordinal, int32_t capability, int32_t shared_memory) {
  return {ordinal, capability, 108, shared_memory, shared_memory + 1024, 40 << 20, "made-up GPU"};
}

// Whether a row is only for calls that ask for it.
bool is_on_request(int place) { return place % 5 == 3; }

// Problems of few kinds and of many sizes, some beyond what a row can count.
Problem made_up_problem() {
  int32_t const head_dim = one_of({8, 40, 60, 64, 128, 200, 256, 264});
  int32_t const heads_kv = one_of({1, 2, 8});
  auto const seqlen = [] {
    return one_of({0, 1, 7, 64, 129, 1000, 4096, int(generator()() % 5000), kMaxSeqlen + 1});
  };
  Problem p{};
  p.direction = one_of({Direction::Forward, Direction::Backward});
  p.dtype = one_of({DType::Float16, DType::BFloat16});
  p.batch = one_of({1, 3, 1 << 14, 1 << 26});
  p.seqlen_q = seqlen();
  p.seqlen_k = seqlen();
  p.heads = heads_kv * one_of({1, 4});
  p.heads_kv = heads_kv;
  p.head_dim = head_dim;
  p.head_dim_v = one_of({head_dim, head_dim, 128});
  p.window_left = one_of({kUnbounded, kUnbounded, 100});
  p.window_right = one_of({kUnbounded, 0});
  p.softcap = one_of({0.f, 0.f, 30.f});
  p.features = one_of<uint32_t>({0, 0, 0, kSink, kBias, kAlibi, kBias | kDropout, kQv});
  return p;
}

bool is_of(LoadedRow const& row, int32_t arch) {
  return arch == kAnyArch || static_cast<int32_t>(row.row->key.arch) == arch;
}

// Of the rows of one architecture that serve a problem: the fewest modifiers that the problem does
// not ask for, the smallest head dims, of backward rows of sm80 the most shared memory, the
// smallest estimate, the first.
LoadedRow const* expected_of(std::vector<Candidate> const& all, Problem const& problem, Arch arch) {
  using Rank = std::tuple<int, int32_t, int32_t, int32_t, double>;
  uint32_t const asked = problem.features | (problem.softcap != 0 ? uint32_t(kSoftcap) : 0);
  LoadedRow const* best = nullptr;
  Rank least;
  for (Candidate const& candidate : all) {
    if (!is_of(*candidate.row, int32_t(arch)) || !candidate.reasons.empty()) continue;
    KernelRow const& row = *candidate.row->row;
    bool const by_tiles = row.key.direction == Direction::Backward && row.key.arch == Arch::Sm80;
    int unasked = 0;
    for (uint32_t const mod :
         {score_mods::Softcap, score_mods::Alibi, score_mods::Bias, score_mods::Dropout}) {
      unasked += (row.key.score_mods & ~asked & mod) != 0;
    }
    check(unasked == 0 || row.key.score_mods == score_mods::Every, "a row that demands nothing");
    Rank const rank{unasked, row.key.head_dim, row.key.head_dim_v,
                    by_tiles ? -row.shared_memory_bytes : 0, candidate.estimate_us};
    if (best == nullptr || rank < least) std::tie(best, least) = std::tie(candidate.row, rank);
  }
  return best;
}

// Of the rows chosen of each architecture the one with the smallest estimate, the first of equals.
LoadedRow const* expected_of_any(std::vector<Candidate> const& all, Problem const& problem) {
  Candidate const* best = nullptr;
  for (Candidate const& candidate : all) {
    if (candidate.row != expected_of(all, problem, candidate.row->row->key.arch)) continue;
    if (best == nullptr || candidate.estimate_us < best->estimate_us) best = &candidate;
  }
  return best == nullptr ? nullptr : best->row;
}

std::string name_of(LoadedRow const* row) { return row == nullptr ? "none" : row->row->name; }

std::string found(Problem const& problem, int32_t arch, DeviceInfo const& device) {
  try {
    return name_of(&find_row(problem, arch, device));
  } catch (std::runtime_error const&) {
    return "none";
  }
}

// How many problems a row of `arch` serves.
int check_choice(Problem const& problem, int32_t arch, DeviceInfo const& device) {
  std::vector<Candidate> const all = candidates(problem, &device);
  LoadedRow const* const expected = arch == kAnyArch
                                        ? expected_of_any(all, problem)
                                        : expected_of(all, problem, static_cast<Arch>(arch));
  check_equal(found(problem, arch, device), name_of(expected), "the row that is found");
  for (Candidate const& candidate : all) {
    bool const chosen = candidate.row == expected_of(all, problem, candidate.row->row->key.arch);
    if (candidate.chosen != chosen) check_equal(candidate.chosen, chosen, candidate.row->row->name);
  }
  return expected != nullptr;
}

void test_random_problems() {
  DeviceInfo const devices[] = {device(0, 80, 163 << 10), device(1, 90, 227 << 10),
                                device(2, 89, 99 << 10)};
  int served = 0;
  for (int i = 0; i < kProblems; ++i) {
    int32_t const arch = one_of({kAnyArch, int32_t(Arch::Sm80), int32_t(Arch::Sm90)});
    served += check_choice(made_up_problem(), arch, devices[i % 3]);
  }
  check(served > kProblems / 10 && served < kProblems * 9 / 10, "some problems are served");
}

// A call that asks for a row gets it or nothing, and asks no other family or cost model.
void test_rows_on_request() {
  DeviceInfo const hopper = device(1, 90, 227 << 10);
  int served = 0;
  for (int i = 0; i < kProblems; ++i) {
    Problem problem = made_up_problem();
    auto const refuses = [&](Candidate const& candidate) { return !candidate.reasons.empty(); };
    for (Candidate const& candidate : candidates(problem, &hopper)) {
      if (candidate.row->on_request) check(refuses(candidate), "a row that nobody asked for");
    }
    problem.row = kFirstRow + i % kRows;
    std::string expected = "none";
    for (Candidate const& candidate : candidates(problem, &hopper)) {
      bool const asked = candidate.row->number == problem.row;
      if (!asked) check(refuses(candidate), "a row beside the one that was asked for");
      if (!refuses(candidate)) expected = candidate.row->row->name;
      if (candidate.chosen != !refuses(candidate)) check(false, "the row asked for is chosen");
    }
    check_equal(found(problem, kAnyArch, hopper), expected, "the row asked for");
    served += expected != "none";
  }
  check(served >= 5, "some rows serve calls that ask for them");
  Problem absent = made_up_problem();
  absent.row = kFirstRow + kRows;
  check_equal(found(absent, kAnyArch, hopper), "none", "a row that is not loaded");
  check(row_of_number(80) == nullptr && row_of_number(absent.row) == nullptr, "numbers of no row");
  check_equal(row_of_name("row 7").number, kFirstRow + 7, "the number of a name");
}

// One length after the other, as decoding asks: the estimate decides anew for each.
void test_lengths_alone_change() {
  DeviceInfo const hopper = device(1, 90, 227 << 10);
  Problem problem{Direction::Forward, DType::BFloat16, 1, 1, 1, 8, 2, 64, 64, kUnbounded, 0, 0, 0};
  std::vector<std::string> rows;
  for (int32_t seqlen = 1; seqlen < 3000; seqlen += 37) {
    problem.seqlen_q = problem.seqlen_k = seqlen;
    check_choice(problem, kAnyArch, hopper);
    rows.push_back(found(problem, kAnyArch, hopper));
  }
  std::sort(rows.begin(), rows.end());
  check(rows.front() != rows.back(), "the row depends on the lengths");
}

}  // namespace

// In place of src/kernel_libraries.cpp.
KernelLibraries const& kernel_libraries() {
  static std::vector<KernelRow> const rows = made_up_rows();
  static KernelLibraries const made_up = [] {
    KernelLibraries all;
    for (int i = 0; i < kRows; ++i) {
      all.rows.push_back({&rows[i], nullptr, kFirstRow + i, is_on_request(i)});
    }
    return all;
  }();
  return made_up;
}

}  // namespace cute_attention

int main() {
  cute_attention::test_random_problems();
  cute_attention::test_lengths_alone_change();
  cute_attention::test_rows_on_request();
  return cute_attention::testing::report();
}
