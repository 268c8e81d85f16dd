// split_choice.h: into how many splits a forward call divides its keys, and what it takes then.
#pragma once

#include "cute_attention/c_api.h"
#include "cute_attention/kernel_library.h"

namespace cute_attention {

// The number of splits that takes the least time on a row, by a small model: the time of all CTAs,
// of reading the keys, and of writing and combining the splits' outputs. 1 unless another number is
// expected to save a twentieth. It follows from sizes and the mask alone: of the pointers in
// `params` it reads only whether cu_seqlens_q and cache.seqused_k are null.
int32_t best_splits(KernelRow const& row, ForwardParams const& params, DeviceInfo const& device);

// Whether best_splits() may be more than 1, whichever row serves the call: not where it has tiles
// for several rounds of CTAs. Fast, so that other calls spend no time on the choice.
bool may_be_split(ForwardParams const& params, DeviceInfo const& device);

// What the environment variable CUTE_ATTENTION_SPLITS says: the number of splits of every call
// that leaves it open, or 0 where it is not set. Throws std::invalid_argument where it is no number
// of splits.
int32_t splits_of_environment();

// Whether choose_splits() may be more than 1, whichever row serves the call. As fast.
bool may_choose_splits(ForwardParams const& params, DeviceInfo const& device);

// The number of splits of a call on a row: the one that the call asks for, or else the environment,
// or else the best; 1 where the row, the sizes or batch_invariant allow no other. Launches and the
// C API's explanations have it from here.
int32_t choose_splits(KernelRow const& row, ForwardParams const& params, DeviceInfo const& device);
// The same of the call of a problem; 1 of a backward problem.
int32_t choose_splits(KernelRow const& row, Problem const& problem, DeviceInfo const& device);

// How long the call of a problem is expected to take on a row with the number of splits that it
// asks for, or else the best, in microseconds: by this model where keys are divided, or else by the
// cost model. A caller that is told the best number by cute_attention_forward_workspace(), and then
// asks for it, gets the same row, or one that is expected to take less.
double call_us(KernelRow const& row, Problem const& problem, DeviceInfo const& device);

}  // namespace cute_attention
