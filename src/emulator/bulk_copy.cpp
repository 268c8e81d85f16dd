// TMA: bulk copies between global and shared memory, of boxes of tensors and of plain bytes.
#include <array>
#include <cstring>

#include "emulator/memory.h"
#include "emulator/numbers.h"
#include "emulator/swizzle.h"
#include "emulator/tensor_map.h"

namespace cute_attention::emulator {
namespace {

// Instruction::mode
enum Direction : uint32_t { kLoad, kStore, kAddFloats };

using Coordinates = std::array<int64_t, kMostDimensions>;

// Calls f(offset into the box, address or null where it is outside of the tensor) for each element.
template <class F>
void for_each_element(TensorMap const& map, Coordinates const& first, F f) {
  uint32_t const count = map.box_bytes() / map.element_bytes;
  for (uint32_t number = 0; number < count; ++number) {
    uint32_t rest = number;
    uint64_t address = map.base;
    bool is_inside = true;
    for (uint32_t i = 0; i < map.dimensions; ++i) {
      int64_t const x = first[i] + rest % map.box[i];
      rest /= map.box[i];
      is_inside = is_inside && x >= 0 && x < static_cast<int64_t>(map.sizes[i]);
      address += static_cast<uint64_t>(x) * map.strides[i];
    }
    f(number * map.element_bytes, is_inside ? reinterpret_cast<uint8_t*>(address) : nullptr);
  }
}

void add_floats(uint8_t* sums, uint8_t const* values, uint32_t bytes) {
  for (uint32_t i = 0; i < bytes; i += 4) {
    float sum, value;
    std::memcpy(&sum, sums + i, 4);
    std::memcpy(&value, values + i, 4);
    sum += value;
    std::memcpy(sums + i, &sum, 4);
  }
}

// What TMA writes is there for both kinds of readers.
void write_shared(Cta& cta, uint32_t address, uint8_t const* data, uint32_t bytes) {
  for (uint8_t* view : {cta.shared, cta.async_shared}) {
    if (data != nullptr) {
      std::memcpy(view + address, data, bytes);
    } else {
      std::memset(view + address, 0, bytes);
    }
  }
}

void load_box(Cta& cta, TensorMap const& map, Coordinates const& first, uint32_t shared) {
  for_each_element(map, first, [&](uint32_t offset, uint8_t const* address) {
    write_shared(cta, swizzled(shared + offset, map.swizzle_bytes), address, map.element_bytes);
  });
}

void store_box(Cta& cta, TensorMap const& map, Coordinates const& first, uint32_t shared,
               bool adds) {
  for_each_element(map, first, [&](uint32_t offset, uint8_t* address) {
    if (address == nullptr) return;
    uint8_t const* const data = cta.async_shared + swizzled(shared + offset, map.swizzle_bytes);
    cta.grid->write_global(address, map.element_bytes, [&] {
      if (adds) {
        add_floats(address, data, map.element_bytes);
      } else {
        std::memcpy(address, data, map.element_bytes);
      }
    });
  });
}

void check_shared(Warp const& warp, uint32_t address, uint64_t bytes, uint32_t alignment) {
  if (warp.cta->contains(address, bytes) && address % alignment == 0) return;
  fail(
      "%s: a bulk copy of %llu bytes at shared address %u, which is outside or not a multiple of "
      "%u",
      where(warp).c_str(), static_cast<unsigned long long>(bytes), address, alignment);
}

void begin_load(Warp& warp, uint32_t barrier, uint32_t bytes, Job load) {
  Cta* const cta = warp.cta;
  Job const job = [=] {
    load();
    cta->arrive(barrier, 0, -static_cast<int64_t>(bytes));
  };
  if (warp.grid->is_late()) {
    cta->arriving.push_back(job);
  } else {
    job();
  }
}

TensorMap map_of(Warp const& warp, Operand const& operand, int lane) {
  uint64_t const address = address_of(warp, operand, lane);
  TensorMap map;
  if (address % 64 != 0) fail("%s: a tensor map that is not aligned", where(warp).c_str());
  std::memcpy(&map, reinterpret_cast<void const*>(address), sizeof(map));
  if (map.dimensions != operand.parts[1].parts.size()) {
    fail("%s: %d coordinates for a tensor map of %d dimensions", where(warp).c_str(),
         static_cast<int>(operand.parts[1].parts.size()), map.dimensions);
  }
  return map;
}

// cp.async.bulk.tensor [shared], [map, coordinates], [mbarrier]; or [map, coordinates], [shared]
void copy_box(Warp& warp, Instruction const& instruction, uint32_t mask) {
  constexpr uint32_t kBoxAlignment = 128;
  auto const& operands = instruction.operands;
  bool const loads = instruction.mode == kLoad, adds = instruction.mode == kAddFloats;
  for_lanes(mask, [&](int lane) {
    Operand const& tensor = operands[loads ? 1 : 0];
    TensorMap const map = map_of(warp, tensor, lane);
    Coordinates first = {};
    for (uint32_t i = 0; i < map.dimensions; ++i) {
      first[i] = static_cast<int32_t>(value_of(warp, tensor.parts[1].parts[i], lane));
    }
    auto const shared = static_cast<uint32_t>(address_of(warp, operands[loads ? 0 : 1], lane));
    check_shared(warp, shared, map.box_bytes(), kBoxAlignment);
    Cta* const cta = warp.cta;
    if (loads) {
      auto const barrier = static_cast<uint32_t>(address_of(warp, operands[2], lane));
      begin_load(warp, barrier, map.box_bytes(), [=] { load_box(*cta, map, first, shared); });
    } else {
      warp.bulk_stores.issued.push_back([=] { store_box(*cta, map, first, shared, adds); });
    }
  });
}

// cp.async.bulk [shared], [global], bytes, [mbarrier]; or [global], [shared], bytes
void copy_bytes(Warp& warp, Instruction const& instruction, uint32_t mask) {
  constexpr uint32_t kUnit = 16;
  auto const& operands = instruction.operands;
  bool const loads = instruction.mode == kLoad, adds = instruction.mode == kAddFloats;
  for_lanes(mask, [&](int lane) {
    auto const shared = static_cast<uint32_t>(address_of(warp, operands[loads ? 0 : 1], lane));
    uint64_t const global = address_of(warp, operands[loads ? 1 : 0], lane);
    auto const bytes = static_cast<uint32_t>(value_of(warp, operands[2], lane));
    check_shared(warp, shared, bytes, kUnit);
    if (global % kUnit != 0 || bytes % kUnit != 0) {
      fail("%s: a bulk copy of %u bytes at 0x%llx", where(warp).c_str(), bytes,
           static_cast<unsigned long long>(global));
    }
    Cta* const cta = warp.cta;
    auto* const data = reinterpret_cast<uint8_t*>(global);
    if (loads) {
      auto const barrier = static_cast<uint32_t>(address_of(warp, operands[3], lane));
      begin_load(warp, barrier, bytes, [=] { write_shared(*cta, shared, data, bytes); });
    } else {
      warp.bulk_stores.issued.push_back([=] {
        uint8_t const* const values = cta->async_shared + shared;
        cta->grid->write_global(data, bytes, [&] {
          if (adds) {
            add_floats(data, values, bytes);
          } else {
            std::memcpy(data, values, bytes);
          }
        });
      });
    }
  });
}

void commit(Warp& warp, Instruction const&, uint32_t) {
  warp.bulk_stores.commit();
  if (!warp.grid->is_strict()) warp.bulk_stores.finish_all_but(0);
}

void wait(Warp& warp, Instruction const& instruction, uint32_t mask) {
  warp.bulk_stores.finish_all_but(value_of(warp, instruction.operands[0], first_lane(mask)));
}

}  // namespace

Execute decode_bulk_copy(Instruction& instruction) {
  if (instruction.words[0] != "cp" || !instruction.has("bulk")) return nullptr;
  if (instruction.has("commit_group")) return commit;
  if (instruction.has("wait_group")) return wait;
  if (instruction.has("prefetch")) return do_nothing;
  if (instruction.has("reduce")) {
    if (!instruction.has("add")) return nullptr;
    instruction.mode = kAddFloats;
  } else {
    instruction.mode = instruction.has("bulk_group") ? kStore : kLoad;
  }
  return instruction.has("tensor") ? copy_box : copy_bytes;
}

}  // namespace cute_attention::emulator
