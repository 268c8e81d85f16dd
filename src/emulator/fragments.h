// emulator/fragments.h: operands of the tensor cores in registers.
#pragma once

#include "emulator/lanes.h"
#include "emulator/numbers.h"

namespace cute_attention::emulator {

// The 16 x 16 elements of A that a warp holds, in four registers of two each: rows 0 to 7 and 8 to
// 15 of columns 0 to 7, then of columns 8 to 15.
template <class T>
void read_a_fragment(Warp const& warp, Operand const& operand, float (&a)[16][16]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      int const row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
      auto const pair = static_cast<uint32_t>(value_of(warp, operand.parts[i], lane));
      a[row][column] = T{static_cast<uint16_t>(pair)};
      a[row][column + 1] = T{static_cast<uint16_t>(pair >> 16)};
    }
  }
}

}  // namespace cute_attention::emulator
