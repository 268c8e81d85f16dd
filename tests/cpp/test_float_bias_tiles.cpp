// test_float_bias_tiles.cpp: that each thread of the sm90 kernels reads the bias of its own scores
// from tiles in fp32, or from a number for each key, without bank conflicts.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <cmath>
#include <set>
#include <vector>

#include "check.h"
#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/bias_map.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/steps_of_64.h"
#include "known_bias.h"

namespace cute_attention {
namespace {

using sm90::BiasTiles;
using testing::check_equal;
using namespace cute;

// A tile of a bias in fp32 as TMA leaves it, which copies a number as two columns of 16 bits.
template <class Layout>
std::vector<float> float_tile_by_tma(KnownBias const& bias, sm90::Box const& box) {
  constexpr int kKeys = decltype(size<1>(Layout{}))::value / 2;
  std::vector<float> tile(size(Layout{}) / 2, NAN);
  for (int query = 0; query < box.rows; ++query)
    for (int head = 0; head < box.heads; ++head)
      for (int key = 0; key < kKeys; ++key) {
        int const row = query * box.heads + head, first = place<Layout>(row, 2 * key);
        check_equal(place<Layout>(row, 2 * key + 1), first + 1, "two halves of a number");
        check_equal(first % 2, 0, "alignment of a number");
        tile[first / 2] = float(bias(query, key, head));
      }
  return tile;
}

// That 16 lanes that load two numbers each in one step share no banks, but of the same numbers.
template <int kRows>
void check_banks_of_floats(BiasTiles const& tiles, int first_row, int thread, int half, int step) {
  using Of = sm90::FloatBiasOfScores;
  std::set<uint32_t> pairs, banks;
  for (int lane = 0; lane < 16; ++lane) {
    int const row = tiles.row(first_row + Of::row(thread + lane, half));
    uint32_t const offset = Of::offset<kRows>(Of::first(row, thread + lane), 0, step);
    check_equal(offset % 2, 0u, "alignment of two numbers");
    pairs.insert(offset / 2);
    banks.insert(offset / 2 % 16);
  }
  check_equal(banks.size(), pairs.size(), "banks of different numbers");
}

// Every score of a forward tile gets the number of its query, its key and its head.
template <class Row>
void test_float_forward(KnownBias const& bias, int shift) {
  using Traits = sm90::ForwardTraits<sm90::FloatBias<Row>>;
  using Layout = typename Traits::SharedMemory::SmemLayoutBias;
  static_assert(Traits::kTileN * 2 == Row::kConfig.tile_n && Traits::kStages >= 2);
  QueryPacking const packing{shift, 1 << shift, 1};
  BiasTensor const tensor{nullptr, 8, bias.has_head ? 8 : 0, bias.has_row ? 8 : 0, 1, 1};
  BiasTiles const tiles =
      sm90::unmapped_bias_tiles(tensor, Traits::kTileM, Traits::kTileN, packing);
  sm90::Box const box = sm90::bias_box(tensor, Traits::kTileM, packing);
  check_equal(tiles.bytes, box.heads * box.rows * Traits::kTileN * 4, "bytes");
  auto const tile = float_tile_by_tma<Layout>(bias, box);
  auto const cS = make_identity_tensor(Shape<Int<64>, Int<Traits::kTileN>>{});  // (64, N)
  for (int warpgroup = 0; warpgroup < Traits::kConsumers; ++warpgroup)
    for (int thread = 0; thread < 128; ++thread) {
      auto const tScS =  // (MMA, MMA_M, MMA_N)
          typename Traits::MmaQK{}.get_slice(thread).partition_C(cS);
      auto tSrS = make_tensor<float>(shape(tScS));  // (MMA, MMA_M, MMA_N)
      fill(tSrS, 0.5f);
      sm90::add_float_bias_tile<Traits::kTileM>(tiles, tile.data(), 64 * warpgroup, thread, 2.f,
                                                tSrS);
      for (int i = 0; i < size(tSrS); ++i) {
        int const row = 64 * warpgroup + int(get<0>(tScS(i)));
        float const number =
            float(bias(packing.query(row), int(get<1>(tScS(i))), packing.head(row)));
        check_equal(tSrS(i), 2.f * number + 0.5f, "bias in fp32 of a score");
      }
      if (thread % 16 == 0)
        for (int half = 0; half < 2; ++half)
          for (int step = 0; step < sm90::FloatBiasOfScores::kGroups; ++step)
            check_banks_of_floats<Traits::kTileM>(tiles, 64 * warpgroup, thread, half, step);
    }
}

// Every score of a forward tile gets the number of its key, where all queries share it, and the
// vectors that a warp loads share no banks, but of the same numbers.
template <class Row>
void test_key_bias() {
  using Traits = sm90::ForwardTraits<sm90::KeyBias<Row>>;
  using Place = sm90::KeyBiasPlace;
  static_assert(Traits::kTileN == Row::kConfig.tile_n && Traits::kStages >= Row::kConfig.stages);
  alignas(16) float numbers[Traits::kTileN];
  std::set<int> places;
  for (int key = 0; key < Traits::kTileN; ++key) {
    places.insert(Place::of_key(key));
    numbers[Place::of_key(key)] = float(key);
  }
  check_equal(int(places.size()), Traits::kTileN, "a place for each key");
  check_equal(*places.rbegin(), Traits::kTileN - 1, "the last place");
  auto const cS = make_identity_tensor(Shape<Int<64>, Int<Traits::kTileN>>{});  // (64, N)
  std::set<int> vectors, banks;
  for (int thread = 0; thread < 128; ++thread) {
    auto const tScS =  // (MMA, MMA_M, MMA_N)
        typename Traits::MmaQK{}.get_slice(thread).partition_C(cS);
    auto tSrS = make_tensor<float>(shape(tScS));  // (MMA, MMA_M, MMA_N)
    fill(tSrS, 0.5f);
    sm90::add_key_bias(numbers, thread, 2.f, tSrS);
    for (int i = 0; i < size(tSrS); ++i)
      check_equal(tSrS(i), 2.f * float(int(get<1>(tScS(i)))) + 0.5f, "bias of a score's key");
    vectors.insert(Place::of_thread(thread, 0) / 4);
    banks.insert(Place::of_thread(thread, 0) / 4 % 8);
  }
  check_equal(banks.size(), vectors.size(), "banks of different vectors");
}

// Every score of a step of the backward gets the number of its query and its key from the tile of
// its warpgroup, each number of which one score alone reads; and the lanes of a warp, which load
// one number each, share no banks, but of the same numbers.
template <class Row>
void test_float_backward(KnownBias const& bias) {
  using Traits = sm90::BackwardTraits<sm90::FloatBias<sm90::StepsOf64<Row>>>;
  using Of = sm90::FloatBiasOfTranspose;
  using Layout = typename Traits::SharedMemory::SmemLayoutBias;
  constexpr int kRows = Traits::kTileM, kKeys = sm90::kWarpgroupM, kSteps = kRows / 16;
  static_assert(Traits::kTileN == kKeys * Traits::kConsumers);
  BiasTensor const tensor{nullptr, 8, 8, bias.has_row ? 8 : 0, 1, 1};
  BiasTiles const tiles = sm90::unmapped_bias_tiles(tensor, kRows, kKeys, unpacked_queries());
  sm90::Box const box = sm90::bias_box(tensor, kRows, unpacked_queries());
  check_equal(tiles.bytes, box.rows * kKeys * 4, "bytes");
  auto const tile = float_tile_by_tma<Layout>(bias, box);
  auto const cSt = make_identity_tensor(Shape<Int<Traits::kTileN>, Int<kRows>>{});  // (N, M)
  std::vector<int> reads(tile.size());
  for (int thread = 0; thread < 128 * Traits::kConsumers; ++thread) {
    int const own = thread % 128, first_key = thread / 128 * kKeys;
    auto const tScS =  // (MMA, MMA_N, MMA_M)
        typename Traits::MmaS{}.get_slice(thread).partition_C(cSt);
    check_equal(int(size(tScS)), sm90::kBiasNumbers * kSteps, "scores of a thread");
    for (int step = 0; step < kSteps; ++step) {
      auto scores = make_tensor<float>(Int<sm90::kBiasNumbers>{});  // (8)
      fill(scores, 0.5f);
      sm90::add_float_bias_step<kRows>(tiles, tile.data(), own, step, 2.f, scores);
      for (int i = 0; i < size(scores); ++i) {
        auto const key_and_query = tScS(sm90::kBiasNumbers * step + i);
        int const key = int(get<0>(key_and_query)) - first_key;
        int const query = int(get<1>(key_and_query));
        check_equal(scores(i), 2.f * float(bias(query, key, 0)) + 0.5f, "bias in fp32 of S^T");
        if (thread < 128) ++reads[place<Layout>(tiles.row(query), 2 * key) / 2];
      }
    }
  }
  int const times = bias.has_row ? 1 : kRows;
  for (int i = 0; i < box.rows * kKeys; ++i) {
    int const place_of_number = place<Layout>(i / kKeys, 2 * (i % kKeys)) / 2;
    check_equal(reads[place_of_number], times, "reads of a number");
  }
  for (int warp = 0; warp < 4; ++warp)
    for (int side = 0; side < 2; ++side)
      for (bool const next : {false, true}) {
        std::set<uint32_t> numbers, banks;
        for (int thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
          uint32_t const first = Of::first<kRows>(tiles.row(Of::query(thread) + side), thread);
          numbers.insert(next ? Of::next_key(first) : first);
        }
        for (uint32_t const number : numbers) banks.insert(number % 32);
        check_equal(banks.size(), numbers.size(), "banks of different numbers of S^T");
        check_equal(int(numbers.size()), bias.has_row ? 32 : 8, "numbers of a load");
      }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  for (int kinds = 0; kinds < 4; ++kinds) {
    KnownBias const bias{(kinds & 1) != 0, (kinds & 2) != 0};
    for (int shift = 0; shift <= 6; ++shift) {
      test_float_forward<rows::forward_64>(bias, shift);
      test_float_forward<rows::forward_128>(bias, shift);
      test_float_forward<rows::forward_256>(bias, shift);
    }
    test_float_backward<rows::backward_64>(bias);
    test_float_backward<rows::backward_64_dropout>(bias);
    test_float_backward<rows::backward_128>(bias);
  }
  test_key_bias<rows::forward_64>();
  test_key_bias<rows::forward_128>();
  test_key_bias<rows::forward_256>();
  return testing::report();
}
