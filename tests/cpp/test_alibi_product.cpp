// test_alibi_product.cpp: what the numbers of the rows add to the product of slopes and places
// (sm90/alibi_product.h), against the formula, for positions that fp32 does not hold, too.
#include "layouts/host_cuda.h"
// The header below needs the one above.
#include "cute_attention/sm90/alibi_product.h"

#include <cmath>
#include <cstdint>
#include <string>

#include "check.h"
#include "cute_attention/params.h"

namespace cute_attention::sm90 {
namespace {

using testing::check;
using testing::check_equal;

constexpr int kTileN = 128;

// For a block of queries whose first one has the diagonal at key `first`: the offsets of two rows
// and a key's place, times the sign of the tile, are the distance of the key.
void check_block(int32_t first, int row, int distance_of_rows) {
  float const slopes[] = {0.5f, 1.f};
  AlibiOperand<cutlass::bfloat16_t, kTileN> operand;
  operand.serves = true;
  int const of_rows[] = {first + row, first + row + distance_of_rows};
  operand.begin(first, of_rows);
  int32_t const nearest = first > 0 ? first / kTileN : 0;
  for (int32_t n_block :
       {0, nearest / 2, nearest - 2, nearest - 1, nearest, nearest + 1, nearest + 2, nearest + 3}) {
    if (n_block < 0) continue;
    std::string const name =
        "diagonal " + std::to_string(first) + ", tile " + std::to_string(n_block);
    operand.place(n_block, slopes);
    int64_t const key = int64_t{n_block} * kTileN;
    int const side = key + kTileN <= first ? 1 : key >= first + kWarpgroupM ? -1 : 0;
    check_equal(operand.side, side, name + ": the side");
    for (int i = 0; i < 2; ++i) {
      double const exact = side * slopes[i] * double(key - of_rows[i]);
      check(std::abs(operand.offsets[i] - exact) <= 2e-7 * std::abs(exact),
            name + ": the offset of a row");
    }
  }
}

}  // namespace
}  // namespace cute_attention::sm90

int main() {
  using namespace cute_attention;
  for (int32_t const first : {-(1 << 24), -64, -1, 0, 1, 127, 128, 1000, 1 << 16, (1 << 24) - 64,
                              (1 << 24) + 1, (1 << 25) + 3, (1 << 29) + 7, kMaxSeqlen - 64}) {
    for (int const row : {0, 7, 17, 55}) {
      for (int const distance_of_rows : {0, 1, 8}) {
        sm90::check_block(first, row, distance_of_rows);
      }
    }
  }
  return testing::report();
}
