// test_grad_bias_store.cpp: which number of the gradient of a bias each thread writes, for the
// accumulators of both architectures: vectors after an exchange, single numbers, parts; and that
// nothing is written where the gradient has no numbers.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <cstring>
#include <string>
#include <vector>

#include "cute_attention/core/grad_bias_store.h"
#include "cute_attention/sm80/grad_bias_traits.h"
#include "cute_attention/sm90/grad_bias_traits.h"
#include "host_warp.h"
#include "kernels/row.h"

namespace cute_attention {
namespace rows {
CUTE_ATTENTION_BACKWARD(of_sm80, Sm80, Float16, 128, 128, Bias, 64, 128, 2, 8, O3)
CUTE_ATTENTION_BACKWARD(of_sm90, Sm90, Float16, 128, 128, Bias, 64, 128, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(of_every, Sm90, Float16, 64, 64, Softcap | Alibi | Bias | Dropout, 64, 128,
                        2, 12, O3)
}  // namespace rows
namespace {

using testing::check;
using testing::check_equal;
using namespace cute;

// Bits go through the emulated warp as floats.
struct StoreWarp : testing::HostWarp {
  static uint32_t shuffle_xor(uint32_t value, int mask) {
    float bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = HostWarp::shuffle_xor(bits, mask);
    std::memcpy(&value, &bits, sizeof(bits));
    return value;
  }
  static int lane(int thread) { return thread % 32; }
};

// What a number of a tile says of itself: its row or its column, which 16 bits hold.
enum class Says { Row, Col };

template <class Traits>
auto known_tile(int thread, Says says) {
  constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN;
  typename Traits::TiledMma const mma;
  auto tile = partition_fragment_C(mma, Shape<Int<kTileM>, Int<kTileN>>{});
  auto const places =
      mma.get_slice(thread).partition_C(make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
  for (int i = 0; i < int(size(tile)); ++i) {
    tile(i) = float(says == Says::Row ? int(get<0>(places(i))) : int(get<1>(places(i)))) + 1.f;
  }
  return tile;
}

constexpr float kUntouched = -7.f;

// The gradient of two sequences and three heads, whose rows begin `row_stride` numbers apart.
template <class Number>
struct Gradient {
  int queries, keys;
  int64_t row_stride;
  std::vector<Number> numbers;
  BackwardParams params{};

  Gradient(int queries, int keys, int64_t row_stride)
      : queries(queries),
        keys(keys),
        row_stride(row_stride),
        numbers(size_t(6 * queries * row_stride + 64), Number(kUntouched)) {
    params.batch = 2;
    params.heads = params.heads_kv = 3;
    params.seqlen_q = queries;
    params.seqlen_k = keys;
    params.grad_bias = {numbers.data(),
                        3 * queries * row_stride,
                        queries * row_stride,
                        row_stride,
                        1,
                        std::is_same_v<Number, float>};
  }

  // Checks that the tile of `block`, kTileM x kTileN, was written and nothing else.
  template <class Traits>
  void check_tile(ScoreBlock const& block, Says says, std::string const& what) const {
    int wrong = 0;
    for (size_t i = 0; i < numbers.size(); ++i) {
      int64_t const index = int64_t(i);
      int64_t const query = index / row_stride % queries, key = index % row_stride;
      bool const inside = index / (queries * row_stride) == block.batch * 3 + block.head &&
                          key < keys && query / Traits::kTileM == block.m_block &&
                          key / Traits::kTileN == block.n_block;
      float const expected =
          !inside ? kUntouched
                  : 1.f + float(says == Says::Row ? query % Traits::kTileM : key % Traits::kTileN);
      wrong += float(numbers[i]) != expected;
    }
    check_equal(wrong, 0, what);
  }
};

template <class Traits, class Number>
void test_write(int queries, int keys, int64_t row_stride, bool vectors) {
  using Store = GradBiasStore<Traits, StoreWarp>;
  BlockGrid const tiles{2, 3, ceil_div(queries, Traits::kTileM), ceil_div(keys, Traits::kTileN)};
  for (ScoreBlock const block : {tiles.block(0), tiles.block(tiles.count() - 1)}) {
    for (Says const says : {Says::Row, Says::Col}) {
      Gradient<Number> gradient(queries, keys, row_stride);
      check_equal(has_vectors(gradient.params.grad_bias), vectors, "vectors");
      std::string const what = std::to_string(queries) + " x " + std::to_string(keys) +
                               ", rows of " + std::to_string(row_stride);
      for (int warp = 0; warp < Traits::kStoreThreads / 32; ++warp) {
        testing::run_warp(
            [&](int lane) {
              int const thread = 32 * warp + lane;
              Store::write(gradient.params, block, thread, known_tile<Traits>(thread, says));
            },
            what);
      }
      gradient.template check_tile<Traits>(block, says, what);
    }
  }
}

// Parts of all tiles, and their sum: three parts are three times the number.
template <class Traits>
void test_parts(int queries, int keys) {
  using Store = GradBiasStore<Traits, StoreWarp>;
  constexpr int kNumbers = Traits::kTileM * Traits::kTileN, kParts = 3;
  Gradient<float> gradient(queries, keys, keys + 1);
  gradient.params.grad_bias.batch_stride = 0;
  BlockGrid const tiles = grad_bias_grid(gradient.params, Traits::kTile);
  check_equal(grad_bias_part_numbers(gradient.params, Traits::kTile), tiles.count() * kNumbers,
              "numbers of a part");
  std::vector<float> parts(size_t(kParts * tiles.count() * kNumbers), NAN);
  gradient.params.grad_bias_parts = parts.data();
  for (int64_t work = 0; work < kParts * tiles.count(); ++work) {
    for (int thread = 0; thread < Traits::kStoreThreads; ++thread) {
      Store::write_part(parts.data() + work * kNumbers, thread,
                        known_tile<Traits>(thread, Says::Col));
    }
  }
  for (int64_t index = 0; index < tiles.count() * kNumbers + 5; ++index) {
    Store::add_parts(gradient.params, kParts, index);
  }
  int wrong = 0;
  for (int64_t i = 0; i < int64_t(gradient.numbers.size()); ++i) {
    int64_t const key = i % (keys + 1);
    bool const inside = key < keys && i < int64_t(3) * queries * (keys + 1);
    float const expected = inside ? kParts * (1.f + float(key % Traits::kTileN)) : kUntouched;
    wrong += gradient.numbers[size_t(i)] != expected;
  }
  check_equal(wrong, 0, "sums of parts");
}

template <class Traits>
void test_traits() {
  for (int const queries : {1, 63, 129, 300}) {
    for (int const keys : {1, 63, 129, 300}) {
      int64_t const aligned = ceil_div(keys, 8) * 8;
      test_write<Traits, half_t>(queries, keys, aligned, true);
      test_write<Traits, half_t>(queries, keys, aligned + 3, false);
      test_write<Traits, float>(queries, keys, aligned, false);
    }
  }
  test_parts<Traits>(130, 200);
  test_parts<Traits>(1, 1);
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_traits<sm80::GradBiasTraits<rows::of_sm80, max_shared_memory(Arch::Sm80), false>>();
  test_traits<sm90::GradBiasTraits<rows::of_sm90, true>>();
  test_traits<sm90::GradBiasTraits<rows::of_every, false>>();
  return testing::report();
}
