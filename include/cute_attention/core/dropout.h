// core/dropout.h: the random bits of dropout, a pure function of (seed, batch, head, query, key).
//
// Each query has one random word, drawn by Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Queries i and i + 8 of a block of 16
// form a class. Their two words are the start and the step of an arithmetic progression over the
// classes of keys, which are keys j and j + 8 of a block of 16. A mixer turns each term of the
// progression into the four bytes that decide about the four scores of a class of queries and a
// class of keys.
//
// In an m16n8 accumulator of S a lane holds rows r, r + 8 and columns c, c + 8, ...; in one of S^T
// it holds the same with queries and keys exchanged. So in both all four bytes of a word are for
// scores of the lane that computes it, and no two lanes compute the same word.
//
// The bits depend on the position of the score alone, not on tiles, architecture or sharding:
// docs/dropout.md has the definition, its cost and its statistics.
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

// The random words of queries 4 * four to 4 * four + 3. `head_index` = batch * heads + head;
// queries and keys count from the start of their sequence.
CUTE_HOST_DEVICE constexpr PhiloxBits dropout_row_words(uint64_t seed, uint32_t head_index,
                                                        uint32_t four) {
  return philox4x32_7({{four, head_index, 0, 0}}, seed);
}

// The random word of a query.
CUTE_HOST_DEVICE constexpr uint32_t dropout_row_word(uint64_t seed, uint32_t head_index,
                                                     uint32_t query) {
  PhiloxBits const bits = dropout_row_words(seed, head_index, query / 4);
  // Selections, since an index that only the run knows would put the words into local memory.
  uint32_t const even = query & 2 ? bits.words[2] : bits.words[0];
  uint32_t const odd = query & 2 ? bits.words[3] : bits.words[1];
  return query & 1 ? odd : even;
}

// The progression of a class of queries, i and i + 8 of a block of 16.
struct DropoutRow {
  uint32_t start;
  uint32_t step;  // odd, so that the progression takes each of the 2^32 values once
};

// The progression of the class of `query`.
CUTE_HOST_DEVICE constexpr DropoutRow dropout_row(uint64_t seed, uint32_t head_index,
                                                  uint32_t query) {
  uint32_t const first = query & ~8u;
  return {dropout_row_word(seed, head_index, first),
          dropout_row_word(seed, head_index, first + 8) | 1u};
}

// The number of the class of `key`, which is also that of the other key of the class, 8 away.
CUTE_HOST_DEVICE constexpr uint32_t dropout_column(uint32_t key) { return key / 16 * 8 + key % 8; }

// A bijection of 32-bit words that makes a progression look random. The constants are those of the
// first mixer that the project hash-prospector found (Wellons 2018); docs/dropout.md compares
// others.
CUTE_HOST_DEVICE constexpr uint32_t dropout_mix(uint32_t x) {
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 12;
  x *= 0x297A2D39u;
  return x ^ x >> 15;
}

// The four bytes of a class of queries and a class of keys.
CUTE_HOST_DEVICE constexpr uint32_t dropout_word(DropoutRow row, uint32_t column) {
  return dropout_mix(row.start + row.step * column);
}

// The byte of `word` that decides whether the score of `query` and `key` is dropped. The score is
// dropped if the byte is less than round(256 * p).
CUTE_HOST_DEVICE constexpr uint32_t dropout_byte(uint32_t word, uint32_t query, uint32_t key) {
  uint32_t const byte = 2 * (query % 16 / 8) + key % 16 / 8;
  return word >> (8 * byte) & 0xFFu;
}

// Compares the four bytes of a word with `drop_count` = round(256 * p), at most 256, by one
// addition between two logical instructions of three operands.
struct KeepTest {
  uint32_t low;   // in each byte drop_count, less 128 if it is at least that
  uint32_t high;  // all ones if drop_count is less than 128, else 0

  CUTE_HOST_DEVICE constexpr explicit KeepTest(uint32_t drop_count)
      : low((drop_count < 128 ? drop_count : drop_count - 128) * 0x01010101u),
        high(drop_count < 128 ? ~0u : 0u) {}

  // Bit 7 of each byte is 1 if the score is kept, 0 if it is dropped. The other bits mean nothing.
  CUTE_HOST_DEVICE constexpr uint32_t operator()(uint32_t word) const {
    // Bit 7 of a byte of `difference` says whether the low seven bits of the word's byte are at
    // least the byte of `low`. It starts as 1, so that no byte borrows from the next.
    uint32_t const difference = (word | 0x80808080u) - low;
    // A byte is at least drop_count if of the three, its own bit 7, `difference` and `high`, two
    // are 1: where drop_count < 128 either of the first two is enough, else both are needed.
    return (word & difference) | (word & high) | (difference & high);
  }
};

}  // namespace cute_attention
