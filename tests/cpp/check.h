// check.h: what the host-only tests share: comparisons that say what differed and go on.
#pragma once

#include <cstdio>
#include <sstream>
#include <string>

namespace cute_attention::testing {

inline int failures = 0;
inline long comparisons = 0;

template <class A, class B>
bool check_equal(A const& got, B const& expected, std::string const& what) {
  ++comparisons;
  if (got == expected) return true;
  ++failures;
  std::ostringstream text;
  text << "FAILED " << what << ": got " << got << ", expected " << expected;
  std::fprintf(stderr, "%s\n", text.str().c_str());
  return false;
}

inline bool check(bool truth, std::string const& what) { return check_equal(truth, true, what); }

// The exit status of a test program: a test that compared nothing has failed.
inline int report() {
  std::printf("%ld comparisons, %d failures\n", comparisons, failures);
  return failures == 0 && comparisons > 0 ? 0 : 1;
}

}  // namespace cute_attention::testing
