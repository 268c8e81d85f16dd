// WGMMA. Each warp computes its 16 rows of the product of its warpgroup.
#include <cstring>

#include "emulator/fragments.h"
#include "emulator/swizzle.h"

namespace cute_attention::emulator {
namespace {

constexpr int kWarpsOfGroup = 4;
constexpr uint32_t kRowsOfWarp = 16;
constexpr uint32_t kDepth = 16;
constexpr uint32_t kMostColumns = 256;

// A matrix in shared memory (PTX ISA, "Matrix Descriptor Format"). Elements have 16 bits.
class SharedMatrix {
 public:
  // `is_k_major`: elements along the sum are neighbours.
  SharedMatrix(uint64_t descriptor, bool is_k_major)
      : begin_(field(descriptor, 0)),
        leading_(field(descriptor, 16)),
        stride_(field(descriptor, 32)),
        is_k_major_(is_k_major) {
    static constexpr uint32_t kSwizzles[] = {0, 128, 64, 32};
    swizzle_ = kSwizzles[descriptor >> 62];
    if (descriptor >> 49 & 7) fail("a WGMMA with a base offset in its descriptor");
  }

  // The address of an element: `row` of A or column of B, and its place `k` along the sum.
  uint32_t at(uint32_t row, uint32_t k) const {
    uint32_t const row_bytes = swizzle_ == 0 ? 16 : swizzle_;
    uint32_t const row_elements = row_bytes / 2;
    uint32_t address = begin_;
    if (is_k_major_) {
      uint32_t const along_k = swizzle_ == 0 ? k / 8 * leading_ + k % 8 * 2 : k * 2;
      address += row / 8 * stride_ + row % 8 * row_bytes + along_k;
    } else {
      uint32_t const blocks = row / row_elements, steps = k / 8;
      address +=
          swizzle_ == 0 ? blocks * stride_ + steps * leading_ : blocks * leading_ + steps * stride_;
      address += k % 8 * row_bytes + row % row_elements * 2;
    }
    return swizzled(address, swizzle_);
  }

 private:
  static uint32_t field(uint64_t descriptor, int shift) {
    return static_cast<uint32_t>(descriptor >> shift & 0x3fff) << 4;
  }

  uint32_t begin_, leading_, stride_, swizzle_;
  bool is_k_major_;
};

template <class T>
float element(Warp const& warp, uint32_t address) {
  if (!warp.cta->contains(address, 2)) {
    fail("%s: a WGMMA reads shared address %u", where(warp).c_str(), address);
  }
  T value;
  std::memcpy(&value, warp.cta->async_shared + address, 2);
  return value;
}

// What an instruction's operands were when it was issued. Registers are read when it is done.
struct Product {
  uint64_t a, b;
  bool adds;  // to the accumulators
  float sign_a, sign_b;
  bool a_is_k_major, b_is_k_major;
};

// mode: A is in registers
template <class T>
void multiply(Warp& warp, Instruction const& instruction, Product const& product) {
  uint32_t const columns = instruction.size;
  float a[kRowsOfWarp][kDepth];
  static float b[kDepth][kMostColumns], sums[kRowsOfWarp][kMostColumns];
  if (instruction.mode != 0) {
    read_a_fragment<T>(warp, instruction.operands[1], a);
  } else {
    SharedMatrix const matrix(product.a, product.a_is_k_major);
    uint32_t const first = warp.index % kWarpsOfGroup * kRowsOfWarp;
    for (uint32_t row = 0; row < kRowsOfWarp; ++row) {
      for (uint32_t k = 0; k < kDepth; ++k) a[row][k] = element<T>(warp, matrix.at(first + row, k));
    }
  }
  SharedMatrix const matrix(product.b, product.b_is_k_major);
  for (uint32_t k = 0; k < kDepth; ++k) {
    for (uint32_t column = 0; column < columns; ++column) {
      b[k][column] = product.sign_b * element<T>(warp, matrix.at(column, k));
    }
  }
  for (uint32_t row = 0; row < kRowsOfWarp; ++row) {
    std::memset(sums[row], 0, columns * sizeof(float));
    for (uint32_t k = 0; k < kDepth; ++k) {
      float const factor = product.sign_a * a[row][k];
      for (uint32_t column = 0; column < columns; ++column)
        sums[row][column] += factor * b[k][column];
    }
  }
  std::vector<Operand> const& accumulators = instruction.operands[0].parts;
  for (size_t i = 0; i < accumulators.size(); ++i) {
    auto const target = destination<float>(warp, accumulators[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      size_t const row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float const old = product.adds ? float_of_bits(target[lane]) : 0.f;
      target[lane] = bits_of_float(old + sums[row][column]);
    }
  }
}

// wgmma.mma_async d, a, b, adds, sign_a, sign_b(, a is transposed), b is transposed
template <class T>
void issue(Warp& warp, Instruction const& instruction, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  auto const& operands = instruction.operands;
  auto const value = [&](size_t i) {
    return i < operands.size() ? value_of(warp, operands[i], first_lane(mask)) : 0;
  };
  bool const a_is_in_registers = instruction.mode != 0;
  Product product;
  product.a = a_is_in_registers ? 0 : value(1);
  product.b = value(2);
  product.adds = value(3) != 0;
  product.sign_a = static_cast<float>(static_cast<int32_t>(value(4)));
  product.sign_b = static_cast<float>(static_cast<int32_t>(value(5)));
  product.a_is_k_major = a_is_in_registers || value(6) == 0;
  product.b_is_k_major = value(a_is_in_registers ? 6 : 7) == 0;
  Warp* const self = &warp;
  Instruction const* const what = &instruction;
  Job const job = [=] { multiply<T>(*self, *what, product); };
  // Products are done in the order of their issue.
  if (warp.wgmma.is_empty() && !warp.grid->is_late()) {
    job();
  } else {
    warp.wgmma.issued.push_back(job);
  }
}

void commit(Warp& warp, Instruction const&, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  warp.wgmma.commit();
  ++warp.wgmma_committed;
}

// A group is done for all four warps at once.
void wait(Warp& warp, Instruction const& instruction, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  uint64_t const may_remain = value_of(warp, instruction.operands[0], first_lane(mask));
  uint64_t const committed = warp.wgmma_committed;
  uint64_t const target = committed - std::min(committed, may_remain);
  Warp* const group = &warp.cta->warps[warp.index / kWarpsOfGroup * kWarpsOfGroup];
  for (Warp* other = group; other < group + kWarpsOfGroup; ++other) {
    if (other->wgmma_committed >= target) continue;
    for_lanes(mask, [&](int lane) { warp.wait[lane] = Wait::kWarpgroup; });
    warp.has_moved = true;
    return;
  }
  for (Warp* other = group; other < group + kWarpsOfGroup; ++other) {
    for (; other->wgmma_finished < target; ++other->wgmma_finished) other->wgmma.finish_oldest();
  }
}

void do_nothing(Warp&, Instruction const&, uint32_t) {}

}  // namespace

Execute decode_wgmma(Instruction& instruction) {
  std::vector<std::string> const& words = instruction.words;
  if (words[0] != "wgmma") return nullptr;
  if (words[1] == "fence") return do_nothing;  // registers are in order here
  if (words[1] == "commit_group") return commit;
  if (words[1] == "wait_group") return wait;
  if (words[1] != "mma_async" || !instruction.has("f32")) return nullptr;
  for (std::string const& word : words) {  // m64n128k16
    size_t const n = word.find('n');
    if (word.compare(0, 3, "m64") == 0 && n != std::string::npos) {
      instruction.size = std::stoul(word.substr(n + 1));
    }
  }
  instruction.mode = instruction.operands[1].kind == OperandKind::kVector;
  if (words.back() == "bf16") return issue<BFloat16>;
  return words.back() == "f16" ? issue<Float16> : nullptr;
}

}  // namespace cute_attention::emulator
