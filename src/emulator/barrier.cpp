// Hardware barriers and mbarriers.
#include <algorithm>

#include "emulator/memory.h"

namespace cute_attention::emulator {
namespace {

enum BarrierMode : uint32_t { kSync, kArrive, kReduceOr };

void finish(Cta& cta, NamedBarrier& barrier) {
  for (Warp* warp : barrier.participants) {
    // A fence of those who go on is also one of what it wrote.
    cta.unfenced.insert(cta.unfenced.end(), warp->unfenced.begin(), warp->unfenced.end());
    warp->unfenced.clear();
    if (warp->awaited_barrier != &barrier) continue;  // it has arrived and gone on
    std::fill_n(warp->wait, kLanes, Wait::kNothing);
    warp->awaited_barrier = nullptr;
    warp->was_released = true;
  }
  bool const any = barrier.any;
  barrier = NamedBarrier();
  barrier.any_of_last = any;
}

// bar.sync number, threads; bar.arrive likewise; bar.red.or.pred p, number, threads, q
void hardware_barrier(Warp& warp, Instruction const& instruction, uint32_t mask) {
  if (!are_together(warp, mask)) return;
  auto const& operands = instruction.operands;
  Cta& cta = *warp.cta;
  bool const reduces = instruction.mode == kReduceOr;
  size_t const first = reduces ? 1 : 0, others = reduces ? 2 : 1;
  auto const number = value_of(warp, operands[first], first_lane(mask));
  if (number >= 16) fail("%s: barrier %d", where(warp).c_str(), static_cast<int>(number));
  NamedBarrier& barrier = cta.barriers[number];
  if (warp.was_released) {
    warp.was_released = false;
    if (reduces) set_bits(warp, operands[0], mask, barrier.any_of_last ? kAllLanes : 0);
    return;
  }
  uint32_t const threads =
      operands.size() > first + others
          ? static_cast<uint32_t>(value_of(warp, operands[first + 1], first_lane(mask)))
          : static_cast<uint32_t>(cta.warps.size()) * kLanes;
  if (barrier.expected != 0 && barrier.expected != threads) {
    fail("%s: barrier %d of %u threads, where others say %u", where(warp).c_str(),
         static_cast<int>(number), threads, barrier.expected);
  }
  barrier.expected = threads;
  barrier.arrived += kLanes;
  barrier.participants.push_back(&warp);
  if (reduces) barrier.any |= (bits_of(warp, operands.back()) & mask) != 0;
  if (barrier.arrived > threads) {
    fail("%s: barrier %d has %u of %u threads", where(warp).c_str(), static_cast<int>(number),
         barrier.arrived, threads);
  }
  if (barrier.arrived == threads) {
    finish(cta, barrier);
    if (reduces) set_bits(warp, operands[0], mask, barrier.any_of_last ? kAllLanes : 0);
  } else if (instruction.mode != kArrive) {
    for_lanes(mask, [&](int lane) { warp.wait[lane] = Wait::kBarrier; });
    warp.awaited_barrier = &barrier;
    warp.has_moved = true;
  }
}

uint32_t mbarrier_address(Warp const& warp, Operand const& operand, int lane) {
  return static_cast<uint32_t>(address_of(warp, operand, lane));
}

void init(Warp& warp, Instruction const& instruction, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    uint32_t const address = mbarrier_address(warp, instruction.operands[0], lane);
    bytes_at(warp, instruction, kShared, address, 8, lane);
    Mbarrier barrier;
    barrier.count = static_cast<uint32_t>(value_of(warp, instruction.operands[1], lane));
    barrier.pending = barrier.count;
    warp.cta->mbarriers[address] = barrier;
  });
}

void invalidate(Warp& warp, Instruction const& instruction, uint32_t mask) {
  for_lanes(mask, [&](int lane) {
    warp.cta->mbarriers.erase(mbarrier_address(warp, instruction.operands[0], lane));
  });
}

enum ArriveMode : uint32_t { kArriveOnly, kArriveAndExpect, kExpectOnly };

// mbarrier.arrive _, [address], count; mbarrier.arrive.expect_tx _, [address], bytes;
// mbarrier.expect_tx [address], bytes
void arrive(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  size_t const at = operands[0].kind == OperandKind::kAddress ? 0 : 1;
  for_lanes(mask, [&](int lane) {
    bool const has_number = operands.size() > at + 1;
    int64_t const number =
        has_number ? static_cast<int64_t>(value_of(warp, operands[at + 1], lane)) : 1;
    int64_t const arrivals = instruction.mode == kArriveOnly   ? number
                             : instruction.mode == kExpectOnly ? 0
                                                               : 1;
    warp.cta->arrive(mbarrier_address(warp, operands[at], lane), arrivals,
                     instruction.mode == kArriveOnly ? 0 : number);
  });
  // Whoever waits may run before this warp's next instruction.
  warp.ends_turn = warp.grid->timing == Timing::kRandom && warp.grid->random() % 2 == 0;
}

// mbarrier.try_wait.parity p, [address], parity. Those that wait execute it again.
void wait(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  uint32_t complete = 0;
  for_lanes(mask, [&](int lane) {
    warp.awaited_mbarrier[lane] = mbarrier_address(warp, operands[1], lane);
    warp.awaited_parity[lane] = static_cast<uint32_t>(value_of(warp, operands[2], lane));
    Mbarrier const& barrier = warp.cta->mbarrier(warp.awaited_mbarrier[lane]);
    complete |= uint32_t(barrier.has_completed(warp.awaited_parity[lane])) << lane;
  });
  set_bits(warp, operands[0], mask, complete);
  if (complete == mask) return;
  for_lanes(mask, [&](int lane) {
    if (complete >> lane & 1) {
      ++warp.at[lane];
    } else {
      warp.wait[lane] = Wait::kMbarrier;
    }
  });
  warp.has_moved = true;
}

// mbarrier.test_wait.parity p, [address], parity: asks, and waits for nothing.
void test(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  uint32_t complete = 0;
  for_lanes(mask, [&](int lane) {
    Mbarrier const& barrier = warp.cta->mbarrier(mbarrier_address(warp, operands[1], lane));
    uint32_t const parity = static_cast<uint32_t>(value_of(warp, operands[2], lane));
    complete |= uint32_t(barrier.has_completed(parity)) << lane;
  });
  set_bits(warp, operands[0], mask, complete);
}

Execute decode_mbarrier(Instruction& instruction) {
  if (instruction.has("init")) return init;
  if (instruction.has("inval")) return invalidate;
  if (instruction.has("try_wait")) return instruction.has("parity") ? wait : nullptr;
  if (instruction.has("test_wait")) return instruction.has("parity") ? test : nullptr;
  bool const arrives = instruction.has("arrive"), expects = instruction.has("expect_tx");
  if (!arrives && !expects) return nullptr;
  instruction.mode = !expects ? kArriveOnly : arrives ? kArriveAndExpect : kExpectOnly;
  return arrive;
}

}  // namespace

Execute decode_barrier(Instruction& instruction) {
  std::string const& name = instruction.words[0];
  if (name == "mbarrier") return decode_mbarrier(instruction);
  if (name != "bar" && name != "barrier") return nullptr;
  if (instruction.has("cluster") || instruction.has("and") || instruction.has("popc"))
    return nullptr;
  instruction.mode = instruction.has("arrive") ? kArrive
                     : instruction.has("red")  ? kReduceOr
                                               : kSync;
  return hardware_barrier;
}

}  // namespace cute_attention::emulator
