// core/kept_block.h: which of its scores a thread keeps under dropout (core/dropout.h), in blocks
// of 16 x 16 scores: those that are one K block of an A operand (accumulator.h).
//
// A thread holds eight scores of a block, in this order:
//
//   bit 0 of the index   which of two adjacent columns of the accumulator
//   bit 1                which of two rows, 8 apart
//   bit 2                which of two pairs of columns, 8 apart
//
// Those of one column parity share a word of dropout bits, so a block takes two words.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/dropout.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/score_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

// Whether the accumulator has queries as rows (S) or keys (S^T).
enum class Rows { Queries, Keys };

// The scores of a thread in one block.
template <Rows kRows>
struct KeptBlock {
  uint32_t words[2];  // of even and odd columns: bit 7 of a byte is 1 where a score is kept

  // The byte of the scores whose index has these bits 1 and 2.
  CUTE_HOST_DEVICE static constexpr int byte(int row, int col) {
    return kRows == Rows::Queries ? 2 * row + col : 2 * col + row;
  }

  // Whether score `i` of the eight is kept.
  CUTE_HOST_DEVICE bool keeps(int i) const {
    return (words[i % 2] & 0x80u << 8 * byte(i / 2 % 2, i / 4)) != 0;
  }

  // Replaces those of eight 16-bit numbers whose scores are dropped by zeros.
  template <class Numbers>
  CUTE_DEVICE void drop(Numbers&& numbers) const {
    CUTE_STATIC_ASSERT_V(cute::size(numbers) == cute::Int<8>{});
    CUTE_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      reinterpret_cast<uint32_t&>(numbers(2 * pair)) &= mask(byte(pair % 2, pair / 2));
    }
  }

 private:
  // Ones in the low half where the byte of the first word keeps its score, and in the high half
  // where that of the second word does: PRMT copies the sign of a byte to a whole byte.
  CUTE_DEVICE uint32_t mask(int byte) const {
    uint32_t const selector = 0x8888u | byte | byte << 4 | (4 + byte) << 8 | (4 + byte) << 12;
    uint32_t result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(words[0]), "r"(words[1]), "r"(selector));
    return result;
  }
};

// Block `k` of columns of an accumulator of S.
//   tile  its scores (score_tile.h)
//   row   of the block's queries
template <class Tile>
CUTE_DEVICE KeptBlock<Rows::Queries> kept_block(Tile const& tile, KeepTest const& test,
                                                DropoutRow const& row, int k) {
  uint32_t const column =
      dropout_column(uint32_t(tile.first_key(0))) + uint32_t(tile.keys_behind_first(0, 4 * k)) / 2;
  return {{test(dropout_word(row, column)), test(dropout_word(row, column + 1))}};
}

// Block `k` of columns and `m` of rows of an accumulator of S^T.
//   tile   its scores, with queries as rows
//   words  (M)  the random words of the tile's queries
template <class Tile>
CUTE_DEVICE KeptBlock<Rows::Keys> kept_block_of_transpose(Tile const& tile, KeepTest const& test,
                                                          uint32_t const* words, int m, int k) {
  uint32_t const column =
      dropout_column(uint32_t(tile.first_key(0))) + uint32_t(tile.keys_behind_first(0, 2 * m)) / 2;
  uint32_t const* const first = words + int(cute::get<0>(tile.coords(4 * k, 0)));
  return {{test(dropout_word({first[0], first[8] | 1u}, column)),
           test(dropout_word({first[1], first[9] | 1u}, column))}};
}

// Replaces the values of dropped scores by others: in the backward, dP + delta by delta.
//   values, otherwise  (8, BLOCKS)
//   kept_block(n)      of the values of block n
template <class Values, class Others, class MakeBlock>
CUTE_DEVICE void replace_dropped(Values&& values, Others const& otherwise,
                                 MakeBlock const& kept_block) {
  using namespace cute;
  CUTE_STATIC_ASSERT_V(size<0>(values) == Int<8>{});
  CUTE_STATIC_ASSERT_V(size<1>(values) == size<1>(otherwise));
  CUTE_UNROLL
  for (int n = 0; n < size<1>(values); ++n) {
    auto const kept = kept_block(n);
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) {
      values(i, n) = kept.keeps(i) ? values(i, n) : otherwise(i, n);
    }
  }
}

// Takes delta for dP + delta of dropped scores, and multiplies all by keep_scale().
//   tile   dP + delta in the place of its scores, an accumulator of S
//   words  (M)  the random words of the tile's queries, and delta (M)
template <class Tile>
CUTE_DEVICE void drop_gradients(Tile const& tile, DropoutOptions const& dropout,
                                uint32_t const* words, float const* delta) {
  KeepTest const test(uint32_t(dropout.drop_count));
  float const scale = keep_scale(dropout);
  CUTE_UNROLL
  for (int row = 0; row < Tile::kRows; row += 2) {
    int const first = int(cute::get<0>(tile.coords(row, 0)));
    DropoutRow const progression{words[first], words[first + 8] | 1u};
    float const of_row[2] = {delta[first], delta[first + 8]};
    CUTE_UNROLL
    for (int k = 0; k < Tile::kCols / 4; ++k) {
      auto const kept = kept_block(tile, test, progression, k);
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) {
        float& grad_p = tile.scores(row + i / 2 % 2, 4 * k + i / 4 * 2 + i % 2);
        grad_p = scale * (kept.keeps(i) ? grad_p : of_row[i / 2 % 2]);
      }
    }
  }
}

// All blocks of a warpgroup's accumulator, whose values lie in the order of the blocks.
//   kValues  how many a thread holds
template <Rows kRows, int kValues>
struct KeptBlocks {
  static_assert(kValues % 8 == 0, "whole blocks");
  KeptBlock<kRows> blocks[kValues / 8];

  // block(k) makes number k of them.
  template <class MakeBlock>
  CUTE_DEVICE explicit KeptBlocks(MakeBlock const& block) {
    CUTE_UNROLL
    for (int k = 0; k < kValues / 8; ++k) {
      blocks[k] = block(k);
    }
  }

  // Whether score `i` of the accumulator is kept.
  CUTE_DEVICE bool keeps(int i) const { return blocks[i / 8].keeps(i % 8); }

  // Replaces those of 16-bit numbers whose scores are dropped by zeros.
  //   numbers  (MMA, 1, BLOCK)  an A operand
  template <class Operand>
  CUTE_DEVICE void drop(Operand& numbers) const {
    CUTE_STATIC_ASSERT_V(cute::size<2>(numbers) == cute::Int<kValues / 8>{});
    CUTE_UNROLL
    for (int k = 0; k < kValues / 8; ++k) {
      blocks[k].drop(numbers(cute::_, 0, k));
    }
  }
};

// Blocks of an accumulator of S (MMA, 1, MMA_N).
template <class Tile>
CUTE_DEVICE auto kept_blocks(Tile const& tile, DropoutOptions const& dropout,
                             DropoutRow const& row) {
  static_assert(Tile::kRows == 2, "one row of blocks");
  KeepTest const test(uint32_t(dropout.drop_count));
  return KeptBlocks<Rows::Queries, Tile::kRows * Tile::kCols>(
      [&](int k) { return kept_block(tile, test, row, k); });
}

// Blocks of an accumulator of S^T (MMA, 1, MMA_M).
template <class Tile>
CUTE_DEVICE auto kept_blocks_of_transpose(Tile const& tile, DropoutOptions const& dropout,
                                          uint32_t const* words) {
  static_assert(Tile::kCols == 2, "one row of blocks");
  KeepTest const test(uint32_t(dropout.drop_count));
  return KeptBlocks<Rows::Keys, Tile::kRows * Tile::kCols>(
      [&](int k) { return kept_block_of_transpose(tile, test, words, 0, k); });
}

}  // namespace cute_attention
