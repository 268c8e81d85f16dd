// host_warp.h: a warp of 32 lanes on the host, for device code whose shuffles and votes are a
// policy.
//
// Each lane is a fiber with a stack of its own; all of them run on the calling thread, one after
// the other, from one collective (shuffle or vote) to the next. What would hang a GPU or is
// undefined there, lanes that call different collectives or that return while others wait, is
// reported.
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

  // Runs body(lane) in all lanes. Returns how the lanes diverged, "" if they did not; lanes that
  // still wait are unwound then. What a body throws comes out of here.
  [[nodiscard]] static std::string divergence(std::function<void(int)> const& body) {
    return warp().run(body);
  }

  // The collectives, as device code calls them through its policy.
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

  // How many collectives all lanes went through since the program began.
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
  struct Unwind {};  // thrown in lanes that wait for others in vain

  static constexpr int kOutside = kLanes;  // as `current_`: the caller of run(), no lane
  static constexpr size_t kStackBytes = 256 * 1024;

  static HostWarp& warp() {
    static HostWarp the_warp;
    return the_warp;
  }

  // Makes the fibers. They outlast the runs: a lane that has returned waits for the next body.
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

  // A round: every lane that has not returned runs to its next collective, in order.
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

  // A fiber's whole life. It begins within start().
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

  // Waits until all lanes have arrived somewhere.
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

  // The first lane from `lane` on that has not returned; kOutside if there is none.
  int next_lane(int lane) const {
    while (lane < kLanes && returned_[lane]) ++lane;
    return lane;
  }

  // The compiler's own setjmp: swapcontext asks the kernel for the signal mask each time, which is
  // ten times slower, and a hardened longjmp refuses to go to another stack.
  __attribute__((noinline)) void switch_to(int to) {
    int const from = current_;
    current_ = to;
    if (__builtin_setjmp(places_[from]) == 0) jump(places_[to]);
  }
  [[noreturn]] __attribute__((noinline)) static void jump(Place& place) {
    __builtin_longjmp(place, 1);
  }

  // How the lanes' collectives differ, "" if they do not.
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
  Place places_[kLanes + 1];  // where each lane goes on, and the caller of run()
  std::function<void(int)> const* body_ = nullptr;
  int current_ = kOutside;
  std::array<bool, kLanes> returned_{};
  std::array<Collective, kLanes> arrived_{};
  std::array<float, kLanes> arrived_values_{};
  int arrived_votes_ = 0;
  std::array<float, kLanes> values_{};  // of the last exchange, and the votes that were true
  int votes_ = 0;
  bool unwinding_ = false;
  std::exception_ptr error_;
  long exchanges_ = 0;
};

// Runs body(lane) in the 32 lanes of a warp; that they diverge is a failure of the test.
inline bool run_warp(std::function<void(int)> const& body, std::string const& what) {
  return check_equal(HostWarp::divergence(body), std::string(), what);
}

}  // namespace cute_attention::testing
