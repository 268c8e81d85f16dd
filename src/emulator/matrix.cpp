// mma.sync, the loads and stores of its fragments, ldmatrix and stmatrix, and movmatrix, which
// transposes one. In a fragment, lane 4 * row + i of a warp holds columns 2 * i and 2 * i + 1 of a
// row of 8 x 8 elements of 16 bits.
#include <cstring>

#include "emulator/fragments.h"
#include "emulator/memory.h"

namespace cute_attention::emulator {
namespace {

constexpr int kRows = 8;  // of a matrix
constexpr int kRowBytes = 16;

// mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32 d, a, b, c
template <class T>
void multiply(Warp& warp, Instruction const& instruction, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  auto const& operands = instruction.operands;
  float a[16][16], b[16][8], sums[16][8];
  read_a_fragment<T>(warp, operands[1], a);
  for (int lane = 0; lane < kLanes; ++lane) {
    int const row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      auto const pair = static_cast<uint32_t>(value_of(warp, operands[2].parts[i], lane));
      b[8 * i + column][row] = T{static_cast<uint16_t>(pair)};
      b[8 * i + column + 1][row] = T{static_cast<uint16_t>(pair >> 16)};
    }
    for (int i = 0; i < 4; ++i) {
      auto const bits = static_cast<uint32_t>(value_of(warp, operands[3].parts[i], lane));
      sums[row + i / 2 * 8][column + i % 2] = float_of_bits(bits);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) sums[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    int const row = lane / 4, column = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      float const sum = sums[row + i / 2 * 8][column + i % 2];
      set_value(warp, operands[0].parts[i], lane, bits_of_float(sum));
    }
  }
}

Operand const& register_of(Operand const& operand, uint32_t i) {
  return operand.kind == OperandKind::kVector ? operand.parts[i] : operand;
}

// Lane l has the address of row l % 8 of matrix l / 8.
uint8_t* row_of(Warp& warp, Instruction const& instruction, Operand const& address, int lane) {
  return bytes_at(warp, instruction, kShared, address_of(warp, address, lane), kRowBytes, lane);
}

// ldmatrix {d, ...}, [address]; mode: transposed
void load_matrices(Warp& warp, Instruction const& instruction, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  uint8_t const* rows[kLanes];
  for (uint32_t lane = 0; lane < instruction.size * kRows; ++lane) {
    rows[lane] = row_of(warp, instruction, instruction.operands[1], static_cast<int>(lane));
  }
  Warp* const self = &warp;
  Instruction const* const what = &instruction;
  load_shared(warp, instruction, [=] {
    for (uint32_t matrix = 0; matrix < what->size; ++matrix) {
      uint16_t elements[kRows][8];
      for (int row = 0; row < kRows; ++row) {
        std::memcpy(elements[row], rows[matrix * kRows + row], kRowBytes);
      }
      for (int lane = 0; lane < kLanes; ++lane) {
        int const row = lane / 4, column = lane % 4 * 2;
        bool const turned = what->mode != 0;
        uint32_t const low = turned ? elements[column][row] : elements[row][column];
        uint32_t const high = turned ? elements[column + 1][row] : elements[row][column + 1];
        set_value(*self, register_of(what->operands[0], matrix), lane, low | high << 16);
      }
    }
  });
}

// stmatrix [address], {a, ...}; mode: transposed
void store_matrices(Warp& warp, Instruction const& instruction, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  for (uint32_t matrix = 0; matrix < instruction.size; ++matrix) {
    uint16_t elements[kRows][8];
    for (int lane = 0; lane < kLanes; ++lane) {
      int const row = lane / 4, column = lane % 4 * 2;
      auto const pair =
          static_cast<uint32_t>(value_of(warp, register_of(instruction.operands[1], matrix), lane));
      bool const turned = instruction.mode != 0;
      (turned ? elements[column][row] : elements[row][column]) = static_cast<uint16_t>(pair);
      (turned ? elements[column + 1][row] : elements[row][column + 1]) =
          static_cast<uint16_t>(pair >> 16);
    }
    for (int row = 0; row < kRows; ++row) {
      int const lane = static_cast<int>(matrix) * kRows + row;
      Operand const& address = instruction.operands[0];
      uint8_t* const place = row_of(warp, instruction, address, lane);
      store_shared(warp, address_of(warp, address, lane), kRowBytes);
      std::memcpy(place, elements[row], kRowBytes);
    }
  }
}

// movmatrix.sync.aligned.m8n8.trans.b16 d, a
void transpose_matrix(Warp& warp, Instruction const& instruction, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  uint16_t elements[kRows][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    int const row = lane / 4, column = lane % 4 * 2;
    auto const pair = static_cast<uint32_t>(value_of(warp, instruction.operands[1], lane));
    elements[row][column] = static_cast<uint16_t>(pair);
    elements[row][column + 1] = static_cast<uint16_t>(pair >> 16);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    int const row = lane / 4, column = lane % 4 * 2;
    uint32_t const low = elements[column][row], high = elements[column + 1][row];
    set_value(warp, instruction.operands[0], lane, low | high << 16);
  }
}

}  // namespace

Execute decode_matrix(Instruction& instruction) {
  std::string const& name = instruction.words[0];
  if (name == "mma") {
    bool const is_known = instruction.has("m16n8k16") && instruction.words.back() == "f32";
    if (!is_known) return nullptr;
    return instruction.has("bf16") ? multiply<BFloat16> : multiply<Float16>;
  }
  if (name == "movmatrix") return instruction.has("trans") ? transpose_matrix : nullptr;
  if (name != "ldmatrix" && name != "stmatrix") return nullptr;
  instruction.size = instruction.has("x4") ? 4 : instruction.has("x2") ? 2 : 1;
  instruction.mode = instruction.has("trans");
  return name == "ldmatrix" ? load_matrices : store_matrices;
}

}  // namespace cute_attention::emulator
