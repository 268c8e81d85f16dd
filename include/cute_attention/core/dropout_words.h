// core/dropout_words.h: the random words of the queries of a step, in shared memory: what kernels
// that compute S^T need for dropout. Nothing in rows without it.
#pragma once

#include "cute_attention/core/dropout.h"
#include "cute_attention/params.h"

namespace cute_attention {

template <bool kDrops, int kTileM>
struct DropoutWords {
  static constexpr int kWriters = 0;
};

template <int kTileM>
struct DropoutWords<true, kTileM> {
  static constexpr int kWriters = kTileM / 4;  // threads that write them: a call of Philox has four
  alignas(16) uint32_t words[kTileM];          // (M)

  // Writes the words of the queries from `query` on, a multiple of 4. Threads 0 to kWriters - 1
  // call it; the words of queries past the end of the sequence may belong to classes of others that
  // are inside.
  template <class Params>
  CUTE_DEVICE void write(Params const& params, int32_t batch, int32_t head, int32_t query,
                         int thread) {
    uint32_t const first = uint32_t(query) / 4 + uint32_t(thread);
    PhiloxBits const bits =
        dropout_row_words(*params.dropout.seed, uint32_t(batch * params.heads + head), first);
    reinterpret_cast<uint4*>(words)[thread] =
        uint4{bits.words[0], bits.words[1], bits.words[2], bits.words[3]};
  }
};

// The words of the steps of all stages, as part of a kernel's shared memory.
template <bool kDrops, int kTileM, int kStages>
struct DropoutStages {};

template <int kTileM, int kStages>
struct DropoutStages<true, kTileM, kStages> {
  DropoutWords<true, kTileM> dropout[kStages];
};

}  // namespace cute_attention
