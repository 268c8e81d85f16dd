// core/call_counters.h: counters through which the CTAs of one call agree: how many splits of a
// tile of queries are done, so that the last one knows that all are there, or how many tiles are
// taken.
//
// They are in memory of the kernel library that is zero when it is loaded. A call leaves zeros
// behind, so that each call finds zeros, a graph that is replayed too. No two calls that may run at
// the same time have the same counters: each stream has its own, and so has each call that is
// captured into a graph.
#pragma once

#include <cstdint>

namespace cute_attention {

// Counters for a call, on the current device, whose number is `device`, in a stream; null where
// there are none left, or too few. Then the call has to do without.
int32_t* call_counters(int64_t count, int32_t device, void* stream);

}  // namespace cute_attention
