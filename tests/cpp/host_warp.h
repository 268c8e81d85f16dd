// host_warp.h: emulates a warp of 32 lanes on the host. It runs device code that takes its shuffles
// and votes from a template parameter, and gets this class for it.
//
// Each lane is a fiber with a stack of its own. All fibers run on the calling thread, one after the
// other, each from one collective (a shuffle or a vote) to the next. Lanes may call different
// collectives, or one lane may return while others wait. On a GPU such code would hang, or its
// behaviour would be undefined; here it is reported.
#pragma once

#include <ucontext.h>

#include <array>
#include <exception>
#include <functional>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>

#include "check.h"

namespace cute_attention::testing {

class HostWarp {
 public:
  static constexpr int kLanes = 32;

  // Runs body(lane) in all lanes. Returns a text that says how the lanes diverged, "" if they did
  // not. If they diverged, the lanes that still wait are unwound. An exception that a body throws
  // is thrown here again.
  [[nodiscard]] static std::string divergence(std::function<void(int)> const& body) {
    return warp().run(body);
  }

  // The collectives that device code calls.
  static float shuffle_xor(float value, int lane_mask) {
    HostWarp& self = warp();
    self.arrive({Collective::Kind::ShuffleXor, lane_mask}, value);
    return self.values_[self.current_ ^ lane_mask];
  }
  static bool any(bool vote) {
    HostWarp& self = warp();
    self.arrive({Collective::Kind::Any, 0}, vote);
    return self.votes_ > 0;
  }
  static bool all(bool vote) {
    HostWarp& self = warp();
    self.arrive({Collective::Kind::All, 0}, vote);
    return self.votes_ == kLanes;
  }

  // How many collectives the warp has gone through since the program began.
  static long exchanges() { return warp().exchanges_; }

 private:
  struct Collective {
    enum class Kind { None, ShuffleXor, Any, All };
    Kind kind = Kind::None;  // None: the lane has returned
    int lane_mask = 0;

    bool operator==(Collective const& other) const {
      return kind == other.kind && lane_mask == other.lane_mask;
    }
    std::string text() const {
      switch (kind) {
        case Kind::ShuffleXor:
          return "shuffle_xor(" + std::to_string(lane_mask) + ")";
        case Kind::Any:
          return "any";
        case Kind::All:
          return "all";
        default:
          return "its end";
      }
    }
  };
  using Place = void* [5];
  struct Unwind {};  // is thrown in lanes that wait for others in vain

  // The value of `current_` while the caller of run() runs, and no lane.
  static constexpr int kOutside = kLanes;
  static constexpr size_t kStackBytes = 256 * 1024;

  static HostWarp& warp() {
    static HostWarp the_warp;
    return the_warp;
  }

  // Makes the fibers. They stay for all runs: a lane that has returned waits for the next body.
  void start() {
    stacks_.reset(new char[kLanes * kStackBytes]);
    for (int lane = 0; lane < kLanes; ++lane) {
      ucontext_t context;
      if (getcontext(&context) != 0) throw std::runtime_error("HostWarp: getcontext failed");
      context.uc_stack.ss_sp = stacks_.get() + lane * kStackBytes;
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = nullptr;
      makecontext(&context, &HostWarp::live, 0);
      current_ = lane;
      if (__builtin_setjmp(places_[kOutside]) == 0) setcontext(&context);
    }
  }

  // In each round of the loop every lane that has not returned runs to its next collective, lane
  // after lane.
  std::string run(std::function<void(int)> const& body) {
    if (current_ != kOutside) throw std::logic_error("HostWarp: a lane cannot start a warp");
    if (!stacks_) start();
    body_ = &body;
    error_ = nullptr;
    returned_.fill(false);
    std::string diverged;
    bool running = true;
    while (running) {
      arrived_votes_ = 0;
      switch_to(next_lane(0));
      running = next_lane(0) != kOutside;
      if (running && !unwinding_) {
        diverged = disagreement();
        unwinding_ = !diverged.empty() || error_ != nullptr;
        exchanges_ += !unwinding_;
        values_ = arrived_values_;
        votes_ = arrived_votes_;
      }
    }
    unwinding_ = false;
    if (error_) std::rethrow_exception(error_);
    return diverged;
  }

  // What a fiber runs. start() runs it up to its first switch.
  static void live() {
    HostWarp& self = warp();
    self.switch_to(kOutside);
    while (true) {
      int const lane = self.current_;
      try {
        (*self.body_)(lane);
      } catch (Unwind const&) {
      } catch (...) {
        if (!self.error_) self.error_ = std::current_exception();
      }
      self.returned_[lane] = true;
      self.arrived_[lane] = {};
      self.switch_to(self.next_lane(lane + 1));
    }
  }

  // Notes the collective of this lane, and waits until all lanes have arrived at one or returned.
  void arrive(Collective const& collective, float value) {
    if (current_ == kOutside) throw std::logic_error("HostWarp: a collective outside of a warp");
    if (collective.lane_mask < 0 || collective.lane_mask >= kLanes) {
      throw std::out_of_range("HostWarp: " + collective.text() + " leaves the warp");
    }
    arrived_[current_] = collective;
    arrived_values_[current_] = value;
    arrived_votes_ += value != 0.f;
    switch_to(next_lane(current_ + 1));
    if (unwinding_) throw Unwind{};
  }

  // The first lane that has not returned, counted from `lane` on; kOutside if there is none.
  int next_lane(int lane) const {
    while (lane < kLanes && returned_[lane]) ++lane;
    return lane;
  }

  // Lets lane `to` go on, or the caller of run(). It uses the setjmp that is built into the
  // compiler. swapcontext would ask the operating system for the signal mask each time, which is
  // ten times slower, and the longjmp of a hardened C library refuses to go to another stack.
  __attribute__((noinline)) void switch_to(int to) {
    int const from = current_;
    current_ = to;
    if (__builtin_setjmp(places_[from]) == 0) jump(places_[to]);
  }
  [[noreturn]] __attribute__((noinline)) static void jump(Place& place) {
    __builtin_longjmp(place, 1);
  }

  // A text that says how the collectives of the lanes differ; "" if they do not.
  std::string disagreement() const {
    for (int lane = 1; lane < kLanes; ++lane) {
      if (!(arrived_[lane] == arrived_[0])) {
        std::ostringstream text;
        text << "lane 0 is at " << arrived_[0].text() << ", lane " << lane << " at "
             << arrived_[lane].text();
        return text.str();
      }
    }
    return "";
  }

  std::unique_ptr<char[]> stacks_;
  Place places_[kLanes + 1];  // where each lane goes on; the last is for the caller of run()
  std::function<void(int)> const* body_ = nullptr;
  int current_ = kOutside;
  std::array<bool, kLanes> returned_{};
  std::array<Collective, kLanes> arrived_{};
  std::array<float, kLanes> arrived_values_{};
  int arrived_votes_ = 0;
  std::array<float, kLanes> values_{};  // the values of all lanes at the last collective
  int votes_ = 0;                       // how many of them were not 0
  bool unwinding_ = false;
  std::exception_ptr error_;
  long exchanges_ = 0;
};

// Runs body(lane) in the 32 lanes of a warp. If the lanes diverge, the test `what` fails.
inline bool run_warp(std::function<void(int)> const& body, std::string const& what) {
  return check_equal(HostWarp::divergence(body), std::string(), what);
}

}  // namespace cute_attention::testing
