// test_dropout.cpp: compares Philox with published vectors, and checks the bits of dropout and the
// comparison of four bytes at once. With arguments it prints the bits, and a test in Python
// compares them with its own.
#include <cstdlib>

#include "check.h"
#include "cute_attention/core/dropout.h"

namespace cute_attention {
namespace {

using testing::check_equal;

// The known answers of philox4x32 with 7 rounds that were published with Random123 (kat_vectors).
void test_known_answers() {
  struct Vector {
    PhiloxBits counter;
    uint64_t key;
    PhiloxBits expected;
  };
  Vector const vectors[] = {
      {{{0, 0, 0, 0}}, 0, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
      {{{~0u, ~0u, ~0u, ~0u}}, ~uint64_t(0), {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       0x299f31d0a4093822,
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}},
  };
  for (Vector const& vector : vectors) {
    PhiloxBits const bits = philox4x32_7(vector.counter, vector.key);
    for (int word = 0; word < 4; ++word) {
      check_equal(bits.words[word], vector.expected.words[word], "philox4x32-7");
    }
  }
}

uint32_t byte_at(uint64_t seed, uint32_t head_index, uint32_t query, uint32_t key) {
  DropoutRow const row = dropout_row(seed, head_index, query);
  return dropout_byte(dropout_word(row, dropout_column(key)), query, key);
}

// A word of a query is the one that its counter and its place in the call of Philox say.
void test_row_words() {
  uint64_t const seed = 0x0123456789abcdefu;
  for (uint32_t query = 0; query < 64; ++query) {
    PhiloxBits const bits = philox4x32_7({{query / 4, 77, 0, 0}}, seed);
    check_equal(dropout_row_word(seed, 77, query), bits.words[query % 4], "word of a query");
  }
}

// The four scores of a class of queries and a class of keys use the four bytes of one word, and no
// other score of the block uses that word.
void test_classes() {
  for (uint32_t query = 0; query < 8; ++query) {
    for (uint32_t key = 0; key < 8; ++key) {
      bool seen[4] = {};
      DropoutRow const row = dropout_row(7, 3, query + 32);
      for (uint32_t i : {query + 32, query + 40}) {
        for (uint32_t j : {key + 48, key + 56}) {
          seen[dropout_byte(0x03020100u, i, j)] = true;
          check_equal(dropout_row(7, 3, i).start, row.start, "one class of queries");
          check_equal(dropout_row(7, 3, i).step, row.step, "one class of queries");
          check_equal(dropout_column(j), 24 + key, "one class of keys");
        }
      }
      for (bool byte : seen) {
        check_equal(byte, true, "a byte of the word is used");
      }
    }
  }
  for (uint32_t query = 0; query < 4096; ++query) {
    check_equal(dropout_row(7, 3, query).step & 1u, 1u, "the step is odd");
    bool const first = query % 16 < 8;
    DropoutRow const row = dropout_row(7, 3, query);
    uint32_t const word = dropout_row_word(7, 3, query);
    check_equal(first ? row.start : row.step, first ? word : word | 1u, "word of its query");
  }
}

// The classes of 2^30 keys have numbers of their own: the last one of a block of 16 and the first
// of the next are neighbours, to the end.
void test_columns() {
  for (uint32_t block : {0u, 1u, 1000u, (1u << 26) - 2}) {
    for (uint32_t key = 16 * block; key < 16 * block + 8; ++key) {
      check_equal(dropout_column(key), 8 * block + key % 16, "column");
      check_equal(dropout_column(key + 8), dropout_column(key), "column of the other key");
      check_equal(dropout_column(key + 16), dropout_column(key) + 8, "column of the next block");
    }
  }
}

// No two columns of a row have the same word, and a step from a column to the next adds the step.
void test_progression() {
  DropoutRow const row{0xfffffff0u, 0x80000001u};
  check_equal(dropout_word(row, 0), dropout_mix(0xfffffff0u), "start");
  check_equal(dropout_word(row, 1), dropout_mix(0x7ffffff1u), "start + step, modulo 2^32");
  check_equal(dropout_word(row, 1u << 29), dropout_mix(0x1ffffff0u), "the last columns");
}

// The comparison of four bytes at once against the plain one: every byte and every drop count, in
// each place of the word, beside bytes that would borrow or carry if any could.
void test_keep_test() {
  for (uint32_t drop_count = 0; drop_count < 256; ++drop_count) {
    KeepTest const keep(drop_count);
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (uint32_t other : {0u, 127u, 128u, 255u, drop_count, byte}) {
        for (uint32_t place = 0; place < 32; place += 8) {
          uint32_t const rest = other * 0x01010101u & ~(0xFFu << place);
          uint32_t const kept = keep(rest | byte << place) & 0x80808080u;
          uint32_t const expected = (other >= drop_count ? 0x80808080u & ~(0x80u << place) : 0u) |
                                    (byte >= drop_count ? 0x80u << place : 0u);
          check_equal(kept, expected, "kept bytes");
        }
      }
    }
  }
}

// Everything is constexpr, so that kernels may fold what they know at compile time.
static_assert(KeepTest(26)(0x1a19ff00u) >> 31 == 1 && (KeepTest(26)(0x1a19ff00u) & 0x800000u) == 0);
static_assert(dropout_byte(dropout_word(dropout_row(1, 2, 3), dropout_column(4)), 3, 4) < 256);

}  // namespace
}  // namespace cute_attention

// test_dropout SEED HEAD_INDEX ROWS COLS prints the bytes of the scores [0, ROWS) x [0, COLS), one
// line for each row.
int main(int argc, char** argv) {
  using namespace cute_attention;
  if (argc == 5) {
    uint64_t const seed = std::strtoull(argv[1], nullptr, 10);
    uint32_t const head_index = uint32_t(std::atoi(argv[2]));
    for (uint32_t query = 0; query < uint32_t(std::atoi(argv[3])); ++query) {
      for (uint32_t key = 0; key < uint32_t(std::atoi(argv[4])); ++key) {
        std::printf("%u ", byte_at(seed, head_index, query, key));
      }
      std::printf("\n");
    }
    return 0;
  }
  test_known_answers();
  test_row_words();
  test_classes();
  test_columns();
  test_progression();
  test_keep_test();
  return testing::report();
}
