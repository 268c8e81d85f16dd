// check.h: comparisons for the host-only tests. One that fails says what differed, and the test
// goes on.
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

// Prints the counts and returns the exit status of a test program. A program that compared nothing
// has failed, too.
inline int report() {
  std::printf("%ld comparisons, %d failures\n", comparisons, failures);
  return failures == 0 && comparisons > 0 ? 0 : 1;
}

}  // namespace cute_attention::testing
