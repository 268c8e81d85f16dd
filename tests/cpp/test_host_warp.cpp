// test_host_warp.cpp: checks the shuffles and votes of the emulated warp, and that it notices lanes
// that diverge.
#include "host_warp.h"

#include <array>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

using namespace cute_attention::testing;

constexpr int kLanes = HostWarp::kLanes;

// A number that depends on every bit of both arguments.
uint32_t mixed(uint32_t step, uint32_t lane) {
  uint32_t bits = step * 0x9e3779b9u + lane * 0x85ebca6bu;
  bits ^= bits >> 15;
  bits *= 0x2c1b3c6du;
  return bits ^ bits >> 13;
}

void test_shuffle() {
  for (int lane_mask = 0; lane_mask < kLanes; ++lane_mask) {
    std::array<float, kLanes> got{};
    run_warp([&](int lane) { got[lane] = HostWarp::shuffle_xor(100.f + lane, lane_mask); },
             "a shuffle");
    for (int lane = 0; lane < kLanes; ++lane) {
      check_equal(got[lane], 100.f + (lane ^ lane_mask),
                  "shuffle_xor(" + std::to_string(lane_mask));
    }
  }
  std::array<float, kLanes> sums{};
  run_warp(
      [&](int lane) {
        float sum = float(lane);
        for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += HostWarp::shuffle_xor(sum, mask);
        sums[lane] = sum;
      },
      "a sum over the warp");
  for (float sum : sums) check_equal(sum, float(kLanes * (kLanes - 1) / 2), "sum over the warp");
  bool special = true;
  run_warp(
      [&](int lane) {
        float const other = HostWarp::shuffle_xor(lane % 2 ? NAN : -INFINITY, 1);
        special = special && (lane % 2 ? other == -INFINITY : std::isnan(other));
      },
      "a shuffle of NaN and infinity");
  check(special, "NaN and infinity pass through a shuffle");
}

// Votes in which no lane, one lane, all lanes but one, and all lanes are for it.
void test_votes() {
  for (int single = 0; single <= kLanes; ++single) {
    for (bool others : {false, true}) {
      int ones = 0;
      for (int lane = 0; lane < kLanes; ++lane) ones += (lane == single) != others;
      int any_count = 0;
      int all_count = 0;
      run_warp(
          [&](int lane) {
            bool const vote = (lane == single) != others;
            any_count += HostWarp::any(vote);
            all_count += HostWarp::all(vote);
          },
          "votes");
      check_equal(any_count, ones > 0 ? kLanes : 0, "lanes to which any() is true");
      check_equal(all_count, ones == kLanes ? kLanes : 0, "lanes to which all() is true");
    }
  }
}

// A long random sequence of collectives. The result of each is compared with the votes and values
// of all lanes.
void test_mixture() {
  constexpr uint32_t kSteps = 20000;
  long const before = HostWarp::exchanges();
  std::array<long, kLanes> wrong{};
  run_warp(
      [&](int lane) {
        for (uint32_t step = 0; step < kSteps; ++step) {
          uint32_t const choice = mixed(step, kLanes);
          auto const vote = [&](int of) { return mixed(step, of) % 16 == 0 || step % 5 == 0; };
          if (choice % 3 == 0) {
            int const lane_mask = int(choice / 3 % kLanes);
            float const got = HostWarp::shuffle_xor(float(mixed(step, lane) % 4096), lane_mask);
            wrong[lane] += got != float(mixed(step, lane ^ lane_mask) % 4096);
          } else {
            bool any = false;
            bool all = true;
            for (int of = 0; of < kLanes; ++of) {
              any = any || vote(of);
              all = all && vote(of);
            }
            bool const got =
                choice % 3 == 1 ? HostWarp::any(vote(lane)) : HostWarp::all(vote(lane));
            wrong[lane] += got != (choice % 3 == 1 ? any : all);
          }
        }
      },
      "a mixture");
  for (long count : wrong) check_equal(count, 0L, "wrong answers of a mixture in a lane");
  check_equal(HostWarp::exchanges() - before, long(kSteps), "exchanges of a mixture");
}

struct Counted {
  explicit Counted(int& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  int& count_;
};

void test_divergence() {
  struct Case {
    char const* name;
    std::function<void(int)> body;
    char const* expected;
  };
  Case const cases[] = {
      {"other votes", [](int lane) { lane == 5 ? HostWarp::any(true) : HostWarp::all(true); },
       "lane 0 is at all, lane 5 at any"},
      {"other masks", [](int lane) { HostWarp::shuffle_xor(1.f, lane < 31 ? 1 : 2); },
       "lane 0 is at shuffle_xor(1), lane 31 at shuffle_xor(2)"},
      {"a lane that skips a vote",
       [](int lane) {
         if (lane != 7) HostWarp::any(false);
         HostWarp::shuffle_xor(0.f, 1);
       },
       "lane 0 is at any, lane 7 at shuffle_xor(1)"},
      {"a lane that returns early",
       [](int lane) {
         for (int step = 0; step < (lane == 30 ? 9 : 10); ++step) HostWarp::any(true);
       },
       "lane 0 is at any, lane 30 at its end"},
      {"lane 0 alone goes on",
       [](int lane) {
         while (lane == 0) HostWarp::all(true);
       },
       "lane 0 is at all, lane 1 at its end"},
      {"lane 0 alone returns",
       [](int lane) {
         while (lane != 0) HostWarp::all(true);
       },
       "lane 0 is at its end, lane 1 at all"},
  };
  for (Case const& one : cases) {
    int alive = 0;
    auto const body = [&](int lane) {
      Counted const counted(alive);
      one.body(lane);
    };
    check_equal(HostWarp::divergence(body), std::string(one.expected), one.name);
    check_equal(alive, 0, std::string("objects left in lanes after ") + one.name);
    test_shuffle();  // the next warp works as before
  }
}

// If the lanes of a warp diverge, the test that runs it fails.
void test_failure() {
  int const before = failures;
  bool const passed = run_warp(
      [](int lane) {
        if (lane == 3) HostWarp::any(true);
      },
      "meant to fail and taken back: a divergence");
  int const added = failures - before;
  failures = before;
  check(!passed, "run_warp says that a warp diverged");
  check_equal(added, 1, "failures that a divergence adds");
}

template <class Error, class Call>
void check_throws(Call const& call, std::string const& what) {
  bool thrown = false;
  try {
    call();
  } catch (Error const&) {
    thrown = true;
  }
  check(thrown, what);
}

void test_errors() {
  auto const run = [](std::function<void(int)> const& body) {
    return [body] { (void)HostWarp::divergence(body); };
  };
  check_throws<std::runtime_error>(run([](int lane) {
                                     if (lane == 9) throw std::runtime_error("of a lane");
                                     HostWarp::any(true);
                                   }),
                                   "what a lane throws comes out");
  check_throws<std::out_of_range>(run([](int) { HostWarp::shuffle_xor(1.f, kLanes); }),
                                  "a shuffle beyond the warp");
  check_throws<std::logic_error>([] { HostWarp::any(true); }, "a vote outside of a warp");
  check_throws<std::logic_error>(run([&](int) { run([](int) {})(); }), "a warp within a warp");
  test_votes();
}

}  // namespace

int main() {
  test_shuffle();
  test_votes();
  test_mixture();
  test_divergence();
  test_failure();
  test_errors();
  return report();
}
