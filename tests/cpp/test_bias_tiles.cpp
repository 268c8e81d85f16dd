// test_bias_tiles.cpp: that each thread of the sm90 kernels reads the bias of its own scores in 16
// bits, from tiles in shared memory without bank conflicts or two numbers at a time, and which
// biases TMA can load.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/bias_words.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/grad_kv_traits.h"
#include "cute_attention/sm90/grad_q_traits.h"
#include "known_bias.h"

namespace cute_attention {
namespace {

using sm90::bias_offset;
using sm90::BiasTiles;
using testing::check;
using testing::check_equal;
using namespace cute;

// A tile in shared memory as TMA leaves it: the box holds (key, head, query), each row of a box
// swizzled as `Layout` (M, N, STAGE) says.
template <class Layout>
std::vector<int> tile_by_tma(KnownBias const& bias, sm90::Box const& box) {
  constexpr int kCols = decltype(size<1>(Layout{}))::value;
  std::vector<int> tile(size(Layout{}), -1);
  for (int query = 0; query < box.rows; ++query)
    for (int head = 0; head < box.heads; ++head)
      for (int key = 0; key < kCols; ++key)
        tile[place<Layout>(query * box.heads + head, key)] = bias(query, key, head);
  return tile;
}

// What ldmatrix gives the threads of a warp for one `step`: four words of two numbers for each
// lane (PTX ISA, "ldmatrix"). Checks that the vectors of no matrix share banks, unless they are the
// same vector.
template <class Vectors, int kRows>
std::vector<int> read_by_warp(std::vector<int> const& tile, BiasTiles const& tiles, int first_row,
                              int warp, int step) {
  bool const transposes = std::is_same_v<Vectors, sm90::BiasOfTranspose>;
  std::vector<uint32_t> vectors;
  for (int lane = 0; lane < 32; ++lane) {
    int const thread = 32 * warp + lane;
    int const row = tiles.row(first_row + Vectors::row(thread, step));
    vectors.push_back(bias_offset<kRows>(row, Vectors::vector(thread, step)));
    uint32_t const first = sm90::first_bias_offset<Vectors, kRows>(tiles, first_row, thread);
    check_equal(Vectors::template offset<kRows>(tiles, first, step), vectors.back(),
                "a step's vector from that of step 0");
  }
  std::vector<int> numbers(32 * 8);
  for (int matrix = 0; matrix < 4; ++matrix) {
    auto const* const rows = &vectors[8 * matrix];
    std::set<uint32_t> const different(rows, rows + 8);
    std::set<uint32_t> banks;
    for (uint32_t const vector : different) banks.insert(vector / 8 % 8);
    check_equal(banks.size(), different.size(), "banks of different vectors");
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 2; ++i) {
        int const along = lane % 4 * 2 + i, across = lane / 4;
        numbers[8 * lane + 2 * matrix + i] =
            transposes ? tile[rows[along] + across] : tile[rows[across] + along];
      }
  }
  return numbers;
}

// Every score of a forward tile gets the bias of its query, its key and its head.
template <class Row>
void test_forward(KnownBias const& bias, int shift) {
  using Traits = sm90::ForwardTraits<Row>;
  using Layout = typename Traits::SharedMemory::SmemLayoutBias;
  constexpr int kSteps = Traits::kTileN / 16;
  QueryPacking const packing{shift, 1 << shift, 1};
  BiasTensor const tensor{nullptr, 8, bias.has_head ? 8 : 0, bias.has_row ? 8 : 0, 1, 0};
  BiasTiles const tiles =
      sm90::unmapped_bias_tiles(tensor, Traits::kTileM, Traits::kTileN, packing);
  sm90::Box const box = sm90::bias_box(tensor, Traits::kTileM, packing);
  check_equal(tiles.bytes, box.heads * box.rows * Traits::kTileN * 2, "bytes");
  auto const tile = tile_by_tma<Layout>(bias, box);
  auto const cS = make_identity_tensor(Shape<Int<64>, Int<Traits::kTileN>>{});  // (64, N)
  for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup)
    for (int thread = 0; thread < 128; ++thread) {
      auto const tScS =  // (MMA, MMA_M, MMA_N)
          typename Traits::MmaQK{}.get_slice(thread).partition_C(cS);
      for (int step = 0; step < kSteps; ++step) {
        auto const numbers = read_by_warp<sm90::BiasOfScores, Traits::kTileM>(
            tile, tiles, 64 * warpgroup, thread / 32, step);
        for (int i = 0; i < 8; ++i) {
          int const row = 64 * warpgroup + int(get<0>(tScS(8 * step + i)));
          int const key = int(get<1>(tScS(8 * step + i)));
          check_equal(numbers[thread % 32 * 8 + i],
                      bias(packing.query(row), key, packing.head(row)), "bias of a score");
        }
      }
    }
}

// Every score of a step of the backward, which computes S^T. Where each warpgroup has a tile of its
// own, these lie side by side as the boxes of one.
template <class Row>
void test_backward(KnownBias const& bias) {
  using Traits = sm90::BackwardTraits<Row>;
  using Buffer = typename Traits::SharedMemory::SmemLayoutBias;
  using Layout = sm90::SmemTiles<typename Traits::Element, Traits::kTileM, Traits::kTileN,
                                 Traits::kBiasOfWarpgroups ? 1 : Traits::kStages, sm90::kBiasBox>;
  constexpr int kColsOfBuffer = decltype(size<1>(Buffer{}))::value;
  for (int row = 0; row < Traits::kTileM; ++row)
    for (int key = 0; key < Traits::kTileN; ++key)
      check_equal(place<Buffer>(row, key % kColsOfBuffer, key / kColsOfBuffer),
                  place<Layout>(row, key), "a number of a warpgroup's tile");
  BiasTensor const tensor{nullptr, 8, 8, bias.has_row ? 8 : 0, 1, 0};
  BiasTiles const tiles =
      sm90::unmapped_bias_tiles(tensor, Traits::kTileM, Traits::kTileN, unpacked_queries());
  auto const tile =
      tile_by_tma<Layout>(bias, sm90::bias_box(tensor, Traits::kTileM, unpacked_queries()));
  auto const cSt = make_identity_tensor(Shape<Int<Traits::kTileN>, Int<Traits::kTileM>>{});
  for (int thread = 0; thread < 128 * Traits::kConsumers; ++thread) {
    auto const tScS = typename Traits::MmaS{}.get_slice(thread).partition_C(cSt);
    for (int step = 0; step < Traits::kTileM / 16; ++step) {
      auto const numbers =
          read_by_warp<sm90::BiasOfTranspose, Traits::kTileM>(tile, tiles, 0, thread / 32, step);
      for (int i = 0; i < 8; ++i) {
        auto const key_and_query = tScS(8 * step + i);
        check_equal(numbers[thread % 32 * 8 + i],
                    bias(int(get<1>(key_and_query)), int(get<0>(key_and_query)), 0),
                    "bias of a score of S^T");
      }
    }
  }
}

// Every score of a step of the kernels that load two numbers at a time. `movmatrix` gives the lane
// with the numbers (l / 4, 2 (l % 4) + i) of a matrix those of its transpose (PTX ISA).
template <class Words, class Mma>
void test_words() {
  KnownBias const bias{true, true};
  constexpr int kTile = 64, kCount = kTile * kTile / 128 / 2;
  auto const tile = make_identity_tensor(Shape<Int<kTile>, Int<kTile>>{});
  for (int thread = 0; thread < 128; ++thread) {
    auto const tCc = Mma{}.get_slice(thread).partition_C(tile);
    check_equal(int(size(tCc)), 2 * kCount, "words of an accumulator");
    for (int word = 0; word < kCount; ++word)
      for (int i = 0; i < 2; ++i) {
        int const lane = thread % 32;
        int const from = Words::kTransposes ? lane % 4 * 8 + 4 * i + lane / 8 : lane;
        int const half = Words::kTransposes ? lane / 4 % 2 : i;
        int const loader = thread / 32 * 32 + from;
        int const loaded = bias(Words::query(loader, word), Words::key(loader, word) + half, 0);
        int const row = int(get<0>(tCc(2 * word + i))), col = int(get<1>(tCc(2 * word + i)));
        check_equal(loaded, Words::kTransposes ? bias(col, row, 0) : bias(row, col, 0),
                    "a score's number of a word");
        check_equal(Words::key(loader, word) % 2, 0, "alignment of a word");
      }
  }
}

// A vector stands where the swizzled layout says.
template <int kRows, int kCols>
void test_offsets() {
  using Layout = sm90::SmemTiles<cutlass::half_t, kRows, kCols, 2, sm90::kBiasBox>;
  for (int row = 0; row < kRows; ++row)
    for (int col = 0; col < kCols; ++col)
      check_equal(int(bias_offset<kRows>(row, col / 8)) + col % 8, place<Layout>(row, col),
                  "offset");
  check_equal(place<Layout>(0, 0, 1), kRows * kCols, "offset of a stage");
}

ForwardParams call_with(BiasTensor const& bias) {
  ForwardParams params{};
  params.batch = 2;
  params.heads = params.heads_kv = 4;
  params.seqlen_q = params.seqlen_k = 100;
  params.bias = bias;
  return params;
}

// Which biases TMA loads, and that a stride which no two numbers have does not matter.
void test_what_tma_loads() {
  auto const at = [](uintptr_t address) { return reinterpret_cast<void*>(address); };
  int64_t const row = 104, head = 100 * row, batch = 4 * head;
  auto const loads = [](BiasTensor const& bias) { return sm90::tma_loads_bias(call_with(bias)); };
  check(loads({at(4096), batch, head, row, 1, 0}), "all dimensions");
  check(loads({at(4096), 0, 0, 0, 1, 0}), "broadcast");
  check(loads({at(4096), head, 0, row, 1, 0}), "one for all heads");
  check(!loads({at(4096), batch, head, row, 1, 1}), "fp32");
  auto const describes = [](BiasTensor const& bias) {
    return sm90::tma_describes_bias(call_with(bias));
  };
  check(describes({at(4096), batch, head, row, 1, 1}), "fp32 in tiles of its own");
  check(describes({at(4096), batch, head, 100, 1, 1}), "rows of fp32 at multiples of 16 bytes");
  check(!describes({at(4096), batch, head, 102, 1, 1}), "crooked rows of fp32");
  check(!describes({at(4100), batch, head, row, 1, 1}), "crooked base of fp32");
  check(!describes({at(4096), batch, int64_t(1) << 36, row, 1, 1}), "long stride of fp32");
  check(!loads({at(4096), batch, head, row, 0, 0}), "one for all keys");
  check(!loads({at(4098), batch, head, row, 1, 0}), "crooked base");
  check(!loads({at(4096), batch, head, 100, 1, 0}), "crooked rows");
  check(!loads({at(4096), batch, head + 4, row, 1, 0}), "crooked heads");
  check(!loads({at(4096), batch + 4, head, row, 1, 0}), "crooked sequences");
  check(!loads({at(4096), batch, int64_t(1) << 39, row, 1, 0}), "stride of more than 40 bits");
  ForwardParams params = call_with({at(4096), 3, 5, 7, 1, 0});
  params.batch = params.heads = params.heads_kv = params.seqlen_q = 1;
  check(sm90::tma_loads_bias(params), "dimensions of one");
  params.seqlen_k = 0;
  check(!sm90::tma_loads_bias(params), "no keys");
}

// A packed sequence longer than the bias, against the caller's word, gets NaN.
void test_longer_sequence() {
  ForwardParams const params = call_with({});
  auto const per_unit = [&](int32_t seqlen_q, int32_t seqlen_k) {
    return sm90::bias_per_unit(
        params, make_sequence(seqlen_q, seqlen_k, 0, 0, kUnbounded, kUnbounded), 0.25f);
  };
  check_equal(per_unit(100, 100), 4.f, "as long as the bias");
  check(per_unit(101, 100) != per_unit(101, 100), "more queries");
  check(per_unit(100, 101) != per_unit(100, 101), "more keys");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_offsets<128, 128>();
  test_offsets<128, 64>();
  test_offsets<64, 128>();
  for (int kinds = 0; kinds < 4; ++kinds) {
    KnownBias const bias{(kinds & 1) != 0, (kinds & 2) != 0};
    for (int shift = 0; shift <= 6; ++shift) {
      test_forward<rows::forward_128>(bias, shift);
      test_forward<rows::forward_256>(bias, shift);
    }
    test_backward<rows::backward_64>(bias);
    test_backward<rows::backward_64_dropout>(bias);
    test_backward<rows::backward_128>(bias);
  }
  test_words<sm90::WordsOfScores, sm90::GradQTraits<rows::backward_256>::MmaS>();
  test_words<sm90::WordsOfTranspose, sm90::GradKvTraits<rows::backward_256>::MmaS>();
  test_what_tma_loads();
  test_longer_sequence();
  return testing::report();
}
