// core/split_arrivals.h: counters in which the splits of a tile of queries arrive, so that the last
// one knows that all are there.
//
// They are in memory of the kernel library that is zero when it is loaded. The last split of a tile
// sets its counter back to zero, so that each call finds zeros, a graph that is replayed too. No
// two calls that may run at the same time have the same counters: each stream has its own, and so
// has each call that is captured into a graph.
#pragma once

#include <cstdint>

namespace cute_attention {

// Counters for a call, on the current device, whose number is `device`, in a stream; null where
// there are none left, or too few. Then a kernel combines the splits (core/combine_splits.h).
int32_t* split_arrivals(int64_t count, int32_t device, void* stream);

}  // namespace cute_attention
