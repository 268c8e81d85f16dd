// test_dropout.cpp: compares Philox with published vectors, and checks the bits of dropout. With
// arguments it prints these bits, and a test in Python compares them with its own.
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

// The 16 scores that a thread holds in a patch use all 16 bytes. Scores of one patch share the same
// bits, and another patch has other bits.
void test_patches() {
  for (uint32_t query = 0; query < 16; query += 8) {
    bool seen[16] = {};
    PhiloxBits const numbered{{0x03020100, 0x07060504, 0x0b0a0908, 0x0f0e0d0c}};
    for (uint32_t row : {query % 8, query % 8 + 8}) {
      for (uint32_t key = 0; key < 32; key += 8) {
        for (uint32_t pair : {0u, 1u}) {
          seen[dropout_byte(numbered, row, key + pair)] = true;
        }
      }
    }
    for (bool byte : seen) {
      check_equal(byte, true, "a byte of the patch is used");
    }
  }
  check_equal(dropout_bits(7, 3, 5, 6).words[0], dropout_bits(7, 3, 13, 31).words[0], "one patch");
  check_equal(dropout_bits(7, 3, 5, 6).words[0] == dropout_bits(7, 3, 21, 6).words[0], false,
              "next patch");
}

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
        std::printf("%u ", dropout_byte(dropout_bits(seed, head_index, query, key), query, key));
      }
      std::printf("\n");
    }
    return 0;
  }
  test_known_answers();
  test_patches();
  return testing::report();
}
