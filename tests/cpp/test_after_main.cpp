// test_after_main.cpp: a call while the process ends, as a thread makes that still runs then: what
// the core remembers must be there, although main() has returned and statics are being destroyed.
#include <unistd.h>

#include <cstdio>

#include "check.h"
#include "fake_call.h"

namespace cute_attention {
namespace {

using testing::check_equal;

// Calls on two devices, the second of which the core has not seen in main().
void call(char const* when, std::initializer_list<int32_t> devices) {
  for (int32_t const device : devices) {
    testing::Answer const answer =
        testing::forward([&](testing::ForwardCall& call) { call.device = device; });
    check_equal(answer.error, "", std::string(when) + ": error");
    check_equal(answer.written[0], 0.f, std::string(when) + ": the row");
    check_equal(answer.written[1], float(device), std::string(when) + ": the device");
  }
}

// Destroyed after all that is made in main().
struct Last {
  ~Last() {
    call("after main", {0, 1});
    std::fflush(stdout);
    _exit(testing::report());
  }
} last;

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::call("in main", {0});
  return 0;
}
