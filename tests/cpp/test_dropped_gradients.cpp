// test_dropped_gradients.cpp: what dropout leaves of dP + delta in the kernel for the gradient of a
// bias, whose MMA deals keys to warps in an order of its own, against the definition of the bits.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <string>
#include <vector>

#include <cute/atom/mma_atom.hpp>

#include "check.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/sm80/grad_bias_traits.h"
#include "kernels/rows.h"

namespace cute_attention {
namespace {

using testing::check;
using namespace cute;

constexpr uint64_t kSeed = 12345678901234;
constexpr int32_t kBatch = 1, kHead = 2, kHeads = 4;

bool is_dropped(int32_t query, int32_t key, int32_t drop_count) {
  DropoutRow const row = dropout_row(kSeed, uint32_t(kBatch * kHeads + kHead), uint32_t(query));
  uint32_t const word = dropout_word(row, dropout_column(uint32_t(key)));
  return int32_t(dropout_byte(word, uint32_t(query), uint32_t(key))) < drop_count;
}

// dP + delta of a query and a key, and delta of a query.
float grad_p(int32_t query, int32_t key) { return float(query * 1000 + key); }
float delta_of(int32_t query) { return -float(query) - 0.5f; }

template <class Traits>
void check_tile(int32_t m_block, int32_t n_block, int32_t drop_count) {
  constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN;
  Sequence const sequence = make_sequence(5000, 5000, 0, 0, kUnbounded, kUnbounded);
  QueryPacking const packing = unpacked_queries();
  BackwardParams params{};
  params.heads = kHeads;
  params.dropout = {&kSeed, drop_count};
  DropoutWords<true, kTileM> words;
  for (int thread = 0; thread < words.kWriters; ++thread) {
    words.write(params, kBatch, kHead, m_block * kTileM, thread);
  }
  std::vector<float> delta(kTileM);
  for (int row = 0; row < kTileM; ++row) delta[row] = delta_of(m_block * kTileM + row);
  float const scale = keep_scale(params.dropout);
  typename Traits::TiledMma const mma;
  for (int thread = 0; thread < Traits::kThreads; ++thread) {
    auto values = partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});
    auto const tile = make_score_tile<kTileM, kTileN>(mma, thread, values, sequence, packing,
                                                      m_block * kTileM, n_block * kTileN);
    using Tile = std::decay_t<decltype(tile)>;
    auto const key_of = [&](int row, int col) {
      return tile.first_key(row) + tile.keys_behind_first(row, col);
    };
    for (int row = 0; row < Tile::kRows; ++row) {
      for (int col = 0; col < Tile::kCols; ++col) {
        tile.scores(row, col) = grad_p(tile.query(row), key_of(row, col));
      }
    }
    drop_gradients(tile, params.dropout, words.words, delta.data());
    for (int row = 0; row < Tile::kRows; ++row) {
      for (int col = 0; col < Tile::kCols; ++col) {
        int32_t const query = tile.query(row), key = key_of(row, col);
        bool const dropped = is_dropped(query, key, drop_count);
        float const expected = scale * (dropped ? delta_of(query) : grad_p(query, key));
        check(tile.scores(row, col) == expected, "query " + std::to_string(query) + ", key " +
                                                     std::to_string(key) + " of " +
                                                     std::to_string(drop_count));
      }
    }
  }
}

template <class Row, int kBytes, bool kSmallHeads>
void check_row() {
  using Traits = sm80::GradBiasTraits<Row, kBytes, kSmallHeads>;
  static_assert(Traits::kDrops);
  for (int32_t const drop_count : {0, 1, 77, 128, 200, 256}) {
    check_tile<Traits>(0, 0, drop_count);
    check_tile<Traits>(3, 5, drop_count);
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  constexpr int kHopper = 227 * 1024;
  check_row<rows::sm90_bwd_bf16_d64_every, kHopper, false>();
  check_row<rows::sm90_bwd_bf16_d64_every, kHopper, true>();
  check_row<rows::sm90_bwd_fp16_d256_every, kHopper, false>();
  check_row<rows::sm80_bwd_fp16_d256_every_99kb, 72 * 1024, false>();
  return testing::report();
}
