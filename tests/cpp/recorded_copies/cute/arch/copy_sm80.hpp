// copy_sm80.hpp: stands in for CuTe's header of that name in test_copy_schedule.cpp: what a thread
// does about its copies is recorded.
#pragma once

#define CUTE_DEVICE inline

namespace recorded {
void wait(int pending);  // until all groups but the last `pending` have landed
void fence();            // what was copied since the last fence is a group
void barrier();          // of all threads
}  // namespace recorded

namespace cute {
template <int kPending>
void cp_async_wait() {
  recorded::wait(kPending);
}
inline void cp_async_fence() { recorded::fence(); }
}  // namespace cute

inline void __syncthreads() { recorded::barrier(); }
