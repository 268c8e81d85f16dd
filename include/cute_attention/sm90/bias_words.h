// sm90/bias_words.h: the bias (core/bias.h) of a step of the kernels whose shared memory has no
// room for tiles of it (bias_tiles.h): each thread loads two numbers at a time from global memory,
// while the tensor cores compute the scores.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "cute_attention/core/bias.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/sm90/bias_tiles.h"

namespace cute_attention::sm90 {

// Which query and key a thread of a warpgroup loads for word `word` of its accumulator: two keys
// from `key` on. The words of an accumulator of S come in the order of bias_tiles.h.
struct WordsOfScores {
  static constexpr bool kTransposes = false;
  CUTE_HOST_DEVICE static constexpr int query(int thread, int word) {
    return thread / 32 * 16 + word % 2 * 8 + thread % 32 / 4;
  }
  CUTE_HOST_DEVICE static constexpr int key(int thread, int word) {
    return word / 2 * 8 + thread % 4 * 2;
  }
};
// The words of an accumulator of S^T are of two queries each: lanes load 8 x 8 numbers as they lie
// in memory, and transpose them.
struct WordsOfTranspose {
  static constexpr bool kTransposes = true;
  CUTE_HOST_DEVICE static constexpr int query(int thread, int word) {
    return word / 2 * 8 + thread % 32 / 4;
  }
  CUTE_HOST_DEVICE static constexpr int key(int thread, int word) {
    return thread / 32 * 16 + word % 2 * 8 + thread % 4 * 2;
  }
};

// A thread's numbers of a step of kKeys keys.
//   Words   WordsOfScores or WordsOfTranspose
//   kCount  how many words its accumulator has
template <class Words, int kCount, int kKeys>
struct BiasWords {
  uint32_t words[kCount] = {};
  bool are_there = false;  // else the step needs BiasTerm: the same in all threads

  // Starts to load them, where rows are aligned and the bias has all keys of the step.
  //   data    where the bias of the head begins
  //   thread  of the warpgroup; opaque()
  template <class Params>
  CUTE_DEVICE void load(Params const& params, bool aligned, void const* data, int32_t first_query,
                        int32_t first_key, int thread) {
    are_there = aligned && first_key + kKeys <= params.seqlen_k;
    if (are_there) {
      CUTE_UNROLL
      for (int word = 0; word < kCount; ++word) {
        // A query past the last is nobody's: it gets the numbers of the last.
        int32_t const query = min_of(first_query + Words::query(thread, word), params.seqlen_q - 1);
        int64_t const index = query * params.bias.row_stride + first_key + Words::key(thread, word);
        words[word] = static_cast<uint32_t const*>(data)[index / 2];
      }
    }
  }

  // Adds them to scores.
  //   tSrS  (MMA, MMA_M, MMA_N)  S, or (MMA, MMA_N, MMA_M) S^T; or those from word `first` on
  template <class Element, class Accumulator>
  CUTE_DEVICE void add(float per_unit, Accumulator& tSrS, int first = 0) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(tSrS) / 2; ++i) {
      uint32_t& word = words[first + i];
      if constexpr (Words::kTransposes) {
        cute::SM75_U32x1_MOVM_T::copy(word, word);
      }
      add_pair<Element>(word, per_unit, tSrS, i);
    }
  }
};

}  // namespace cute_attention::sm90
