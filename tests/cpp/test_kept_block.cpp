// test_kept_block.cpp: which of its scores a thread of the sm80 kernels keeps under dropout, block
// by block, against the byte that decides for each score.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <string>
#include <vector>

#include "check.h"
#include "cute_attention/core/kept_block.h"
#include "cute_attention/sm80/forward_traits.h"

namespace cute_attention {
namespace {

using testing::check_equal;
using namespace cute;
using sm80::MmaAtom;
using sm80::MmaOfWarps;
using sm80::MmaOfWarpsInBlocks;
using Element = cutlass::half_t;

constexpr uint64_t kSeed = 0x0123456789abcdefu;
constexpr uint32_t kHead = 5, kDropCount = 77;
constexpr int kMBegin = 64, kNBegin = 96;

bool is_kept(uint32_t query, uint32_t key) {
  DropoutRow const row = dropout_row(kSeed, kHead, query);
  return dropout_byte(dropout_word(row, dropout_column(key)), query, key) >= kDropCount;
}

Sequence const sequence = make_sequence(1000, 1000, 0, 0, 1000, 1000);
QueryPacking const packing = unpacked_queries();

// A tile of S, as in the forward kernel.
template <class TiledMma, int kTileM, int kTileN>
void check_scores(std::string const& what) {
  for (int thread = 0; thread < size(TiledMma{}); ++thread) {
    auto tSrS = partition_fragment_C(TiledMma{}, Shape<Int<kTileM>, Int<kTileN>>{});
    auto const tile = make_score_tile<kTileM, kTileN>(TiledMma{}, thread, tSrS, sequence, packing,
                                                      kMBegin, kNBegin);
    auto const own = TiledMma{}.get_slice(thread).partition_C(
        make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));  // (MMA, MMA_M, MMA_N)
    auto const places = make_tensor(own.data(), as_a_operand(own.layout()));
    for (int m = 0; m < size<1>(places); ++m) {
      DropoutRow const row = dropout_row(kSeed, kHead, uint32_t(tile.query(2 * m)));
      for (int k = 0; k < size<2>(places); ++k) {
        auto const kept = kept_block(tile, KeepTest(kDropCount), row, k);
        for (int i = 0; i < 8; ++i) {
          auto const place = places(i, m, k);
          check_equal(kept.keeps(i), is_kept(kMBegin + get<0>(place), kNBegin + get<1>(place)),
                      what);
        }
      }
    }
  }
}

// A tile of S^T, as in the backward kernel: warps have kPart adjacent queries.
template <int kWarpsN, int kWarpsM, int kPart>
void check_transpose(std::string const& what) {
  constexpr int kTileM = kWarpsM * kPart, kTileN = 64;
  using TiledMma = decltype(make_tiled_mma(
      MMA_Atom<MmaAtom<Element>>{}, Layout<Shape<Int<kWarpsN>, Int<kWarpsM>, _1>>{},
      Tile<Int<16 * kWarpsN>,
           Layout<Shape<_8, Int<kWarpsM>, Int<kPart / 8>>, Stride<_1, Int<kPart>, _8>>, _16>{}));
  std::vector<uint32_t> words;
  for (int query = kMBegin; query < kMBegin + kTileM; ++query) {
    words.push_back(dropout_row_word(kSeed, kHead, uint32_t(query)));
  }
  for (int thread = 0; thread < size(TiledMma{}); ++thread) {
    auto tSrS = partition_fragment_C(TiledMma{}, Shape<Int<kTileN>, Int<kTileM>>{});
    auto const tile = make_score_tile_of_transpose<kTileM, kTileN>(
        TiledMma{}, thread, tSrS, sequence, packing, kMBegin, kNBegin);
    auto const identity = make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{});
    auto const own = TiledMma{}.get_slice(thread).partition_C(
        make_tensor(identity.data(), select<1, 0>(identity.layout())));
    auto const places = make_tensor(own.data(), as_a_operand(own.layout()));
    for (int n = 0; n < size<1>(places); ++n) {
      for (int k = 0; k < size<2>(places); ++k) {
        auto const kept = kept_block_of_transpose(tile, KeepTest(kDropCount), words.data(), n, k);
        for (int i = 0; i < 8; ++i) {
          auto const place = places(i, n, k);
          check_equal(kept.keeps(i), is_kept(kMBegin + get<0>(place), kNBegin + get<1>(place)),
                      what);
        }
      }
    }
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_scores<MmaOfWarps<Element, 4, 1>, 128, 64>("forward, 128 x 64");
  check_scores<MmaOfWarpsInBlocks<Element, 2, 2>, 64, 64>("forward, 64 x 64");
  check_scores<MmaOfWarpsInBlocks<Element, 2, 2>, 64, 32>("forward, 64 x 32");
  check_transpose<4, 2, 32>("backward, 64 x 64, 4 x 2 warps");
  check_transpose<2, 4, 16>("backward, 64 x 64, 2 x 4 warps");
  check_transpose<2, 2, 16>("backward, 32 x 64, 2 x 2 warps");
  return testing::report();
}
