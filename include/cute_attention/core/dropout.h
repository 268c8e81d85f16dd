// core/dropout.h: the random bits of dropout, a pure function of (seed, batch, head, query, key).
//
// The generator is Philox4x32 with 7 rounds: Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011). One call of it returns 16 bytes. In a patch of 16 queries
// by 32 keys, a thread's accumulator of S holds 16 scores, and each of them gets one of these
// bytes. So a kernel that computes S makes each call once. In an accumulator of S^T a thread holds
// other scores, so a kernel that computes S^T makes more calls to get the same bytes.
//
// The bits depend on the position of the score alone, not on tiles, architecture or sharding:
// docs/design.md, section 5. No row serves dropout yet; the reference backend draws the same bits.
#pragma once

#include <cstdint>
#include <cute/config.hpp>

namespace cute_attention {

struct PhiloxBits {
  uint32_t words[4];
};

// Philox4x32-7 of a 128-bit counter under a 64-bit key.
CUTE_HOST_DEVICE constexpr PhiloxBits philox4x32_7(PhiloxBits counter, uint64_t key) {
  uint32_t key_low = uint32_t(key), key_high = uint32_t(key >> 32);
  for (int round = 0; round < 7; ++round) {
    uint64_t const product_0 = uint64_t(0xD2511F53u) * counter.words[0];
    uint64_t const product_1 = uint64_t(0xCD9E8D57u) * counter.words[2];
    counter = {{uint32_t(product_1 >> 32) ^ counter.words[1] ^ key_low, uint32_t(product_1),
                uint32_t(product_0 >> 32) ^ counter.words[3] ^ key_high, uint32_t(product_0)}};
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

// The bits of the patch that holds score (query, key) of head `head_index` = batch * heads + head.
CUTE_HOST_DEVICE constexpr PhiloxBits dropout_bits(uint64_t seed, uint32_t head_index,
                                                   uint32_t query, uint32_t key) {
  return philox4x32_7({{8 * (query / 16) + query % 8, 4 * (key / 32) + key % 8 / 2, head_index, 0}},
                      seed);
}

// The byte that decides whether the score of `query` and `key` is dropped, taken from the bits of
// its patch. The score is dropped if the byte is less than round(256 * p).
CUTE_HOST_DEVICE constexpr uint32_t dropout_byte(PhiloxBits const& bits, uint32_t query,
                                                 uint32_t key) {
  uint32_t const byte = 8 * (query % 16 / 8) + 2 * (key % 32 / 8) + key % 2;
  return bits.words[byte / 4] >> (8 * (byte % 4)) & 0xFFu;
}

}  // namespace cute_attention
