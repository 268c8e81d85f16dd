// test_bias_tile.cpp: where ldmatrix finds the bias of each score in a tile in shared memory. The
// instruction is emulated with the addresses that the kernels compute.
#include "layouts/host_cuda.h"
// The headers below need the one above.
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "cute_attention/sm80/bias_tile.h"
#include "cute_attention/sm80/forward_traits.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;
using namespace cute;
using sm80::BiasTile;
using sm80::MmaAtom;
using sm80::MmaOfWarps;
using sm80::MmaOfWarpsInBlocks;
using sm80::SmemTile;
using Element = cutlass::half_t;

// A grid of warps whose columns are permuted so that each warp has kPart adjacent ones: those of
// the kernel for the gradient of a bias, and of S^T in the backward kernel.
template <int kWarpsRows, int kWarpsCols, int kPart>
using MmaInParts = decltype(make_tiled_mma(
    MMA_Atom<MmaAtom<Element>>{}, Layout<Shape<Int<kWarpsRows>, Int<kWarpsCols>, _1>>{},
    Tile<Int<16 * kWarpsRows>,
         Layout<Shape<_8, Int<kWarpsCols>, Int<kPart / 8>>, Stride<_1, Int<kPart>, _8>>, _16>{}));

// What the address of a number in the tile says of its row and column.
template <class SmemLayout>
std::vector<int> elements_of_addresses() {
  std::vector<int> found(size(SmemLayout{}), -1);
  for (int m = 0; m < size<0>(SmemLayout{}); ++m) {
    for (int n = 0; n < size<1>(SmemLayout{}); ++n) {
      found[SmemLayout{}(m, n)] = m * size<1>(SmemLayout{}) + n;
    }
  }
  return found;
}

// Each thread gets the bias of its own scores, and the 8 rows of a matrix lie in different banks.
template <class TiledMma, int kTileM, int kTileN, bool kTransposed>
void check_tile(std::string const& what) {
  using Layout = SmemTile<kTileM, kTileN>;
  using Bias = BiasTile<Element, Layout, sm80::kSwizzleCols<kTileN>>;
  Bias const bias(0u);
  std::vector<int> const element_at = elements_of_addresses<Layout>();
  auto const places = Bias::template offsets<TiledMma, kTransposed>(_0{});
  auto const scores = [&](int thread) {  // of each score its row and column in the tile
    auto const identity = make_identity_tensor(make_shape(Int<kTileM>{}, Int<kTileN>{}));
    if constexpr (kTransposed) {
      return TiledMma{}.get_slice(thread).partition_C(
          make_tensor(identity.data(), select<1, 0>(identity.layout())));
    } else {
      return TiledMma{}.get_slice(thread).partition_C(identity);
    }
  };
  for (int warp = 0; warp < size(TiledMma{}) / 32; ++warp) {
    for (int block = 0; block < size<2>(places); block += 2) {
      for (int row = 0; row < size<1>(places); ++row) {
        uint32_t address[32];
        for (int lane = 0; lane < 32; ++lane) {
          uint32_t const first =
              bias.template first_address<TiledMma, kTransposed>(warp * 32 + lane);
          address[lane] = Bias::block_address(first, places(_0{}, row, block));
          check_equal(address[lane] % 16, 0u, what + ": a multiple of 16 bytes");
        }
        for (int matrix = 0; matrix < 4; ++matrix) {
          std::set<uint32_t> banks;
          for (int i = 0; i < 8; ++i) banks.insert(address[8 * matrix + i] / 16 % 8);
          check_equal(banks.size(), size_t(8), what + ": groups of banks");
          for (int lane = 0; lane < 32; ++lane) {
            auto const own = scores(warp * 32 + lane);
            for (int i = 0; i < 2; ++i) {
              int const matrix_row = kTransposed ? lane % 4 * 2 + i : lane / 4;
              int const matrix_col = kTransposed ? lane / 4 : lane % 4 * 2 + i;
              auto const place = own(make_coord(i, matrix % 2), row, block + matrix / 2);
              check_equal(element_at[address[8 * matrix + matrix_row] / 2 + matrix_col],
                          int(get<0>(place)) * kTileN + int(get<1>(place)), what);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_tile<MmaInParts<4, 2, 32>, 128, 64, false>("gradient, 128 x 64");
  check_tile<MmaInParts<4, 2, 32>, 64, 64, false>("gradient, 64 x 64");
  check_tile<MmaInParts<2, 2, 32>, 64, 64, false>("gradient, 64 x 64, 4 warps");
  check_tile<MmaInParts<2, 1, 32>, 32, 32, false>("gradient, 32 x 32");
  check_tile<MmaOfWarps<Element, 4, 1>, 128, 64, false>("forward");
  check_tile<MmaOfWarps<Element, 4, 1>, 128, 32, false>("forward, 128 x 32");
  check_tile<MmaOfWarps<Element, 2, 2>, 64, 64, false>("forward, 64 x 64");
  check_tile<MmaOfWarps<Element, 2, 2>, 64, 32, false>("forward, 64 x 32");
  check_tile<MmaOfWarpsInBlocks<Element, 2, 2>, 64, 64, false>("forward with dropout, 64 x 64");
  check_tile<MmaOfWarpsInBlocks<Element, 2, 2>, 64, 32, false>("forward with dropout, 64 x 32");
  check_tile<MmaInParts<4, 2, 32>, 64, 128, true>("backward, 64 x 128");
  check_tile<MmaInParts<2, 4, 16>, 64, 64, true>("backward, 64 x 64");
  check_tile<MmaInParts<2, 2, 32>, 64, 64, true>("backward, 64 x 64, 4 warps");
  check_tile<MmaInParts<2, 2, 16>, 32, 32, true>("backward, 32 x 32");
  return testing::report();
}
