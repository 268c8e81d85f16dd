// core/append_place.h: which token a row of new keys or of queries is, and where in a cache it
// goes.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/append_params.h"

namespace cute_attention {

// Row `row` of tokens is number `place` of its sequence; of none where sequence is -1.
struct TokenPlace {
  int32_t sequence;
  int32_t place;
};

// Of [batch, seqlen] rows, or packed ones.
CUTE_HOST_DEVICE constexpr TokenPlace token_place(int32_t const* cu_seqlens, int32_t batch,
                                                  int32_t seqlen, int64_t row) {
  if (cu_seqlens == nullptr) {
    int32_t const sequence = int32_t(row / seqlen);
    return {sequence, int32_t(row - int64_t(sequence) * seqlen)};
  }
  int32_t begin = 0, end = batch;  // the first sequence that ends after the row lies between
  while (begin < end) {
    int32_t const middle = begin + (end - begin) / 2;
    if (cu_seqlens[middle + 1] > row) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin == batch ? TokenPlace{-1, 0} : TokenPlace{begin, int32_t(row - cu_seqlens[begin])};
}

// How many new keys a sequence has.
CUTE_HOST_DEVICE constexpr int32_t new_tokens(AppendParams const& params, int32_t sequence) {
  int32_t const* const ends = params.cu_seqlens_new;
  return ends == nullptr ? params.seqlen_new : ends[sequence + 1] - ends[sequence];
}

// Where token `token` of a sequence lies; the page is -1 where there is no place for it.
struct CachePlace {
  int32_t page;
  int32_t row;
};
CUTE_HOST_DEVICE constexpr CachePlace cache_place(KeyCache const& cache, int32_t sequence,
                                                  int64_t token) {
  if (token < 0 || token >= int64_t(cache.pages_per_sequence) * cache.page_size) {
    return {-1, 0};
  }
  int32_t const row = cache.batch_idx == nullptr ? sequence : cache.batch_idx[sequence];
  int32_t page = row;
  if (cache.block_table != nullptr) {
    // There is room for it, so 32 bits count it.
    page = cache.block_table[row * cache.block_table_stride + int32_t(token) / cache.page_size];
  }
  return page < 0 || page >= cache.pages ? CachePlace{-1, 0}
                                         : CachePlace{page, int32_t(token) % cache.page_size};
}

// The row of cos and sin for a token whose sequence has the angle `first` at place 0.
CUTE_HOST_DEVICE constexpr int32_t angle_row(RotaryOptions const& rotary, int32_t first,
                                             int32_t place) {
  int64_t const angle = int64_t(first) + place;
  int64_t const last = rotary.positions > 0 ? rotary.positions - 1 : 0;
  return int32_t(angle < 0 ? 0 : angle > last ? last : angle);
}

// The number of a head with which number `col`, below rotary_dim, is turned, and their angle's
// column of cos and sin.
struct RotaryPair {
  int32_t partner;
  int32_t angle;
  bool is_first;  // col is the a of the pair (a, b)
};
CUTE_HOST_DEVICE constexpr RotaryPair rotary_pair(RotaryOptions const& rotary, int32_t col) {
  int32_t const half = rotary.rotary_dim / 2;
  if (rotary.is_interleaved != 0) {
    return {col ^ 1, col / 2, col % 2 == 0};
  }
  bool const is_first = col < half;
  return {is_first ? col + half : col - half, is_first ? col : col - half, is_first};
}

}  // namespace cute_attention
