#include "emulator/machine.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>

namespace cute_attention::emulator {
namespace {

constexpr int kNowhere = std::numeric_limits<int>::max();
constexpr uint64_t kTurn = 20000;  // instructions
constexpr uint64_t kShortTurn = 3000;
// Rounds of turns until what is on its way arrives, where warps wait for another CTA: they could go
// on and on.
constexpr int kLongestWait = 100;
// In random timing, how many rounds the kernel before takes to end, on average.
constexpr uint64_t kRoundsOfKernelBefore = 16;
constexpr uint8_t kPoison = 0xff;  // bytes that make NaN of every type
constexpr uint64_t kAlignment = 1024;

std::unique_ptr<uint8_t[]> poisoned(uint64_t bytes) {
  std::unique_ptr<uint8_t[]> memory(new uint8_t[bytes]);
  std::memset(memory.get(), kPoison, bytes);
  return memory;
}

uint8_t* aligned(uint8_t* memory) {
  return memory + (kAlignment - reinterpret_cast<uint64_t>(memory) % kAlignment) % kAlignment;
}

void set_special_registers(Warp& warp, uint32_t thread, int lane) {
  Grid const& grid = *warp.grid;
  Cta const& cta = *warp.cta;
  uint32_t const below = (1u << lane) - 1, self = 1u << lane;
  uint32_t const values[kSpecial32] = {
      thread % grid.block[0],
      thread / grid.block[0] % grid.block[1],
      thread / grid.block[0] / grid.block[1],
      grid.block[0],
      grid.block[1],
      grid.block[2],
      cta.id[0],
      cta.id[1],
      cta.id[2],
      grid.size[0],
      grid.size[1],
      grid.size[2],
      static_cast<uint32_t>(lane),
      static_cast<uint32_t>(warp.index),
      cta.id[0] % grid.multiprocessors,
      grid.multiprocessors,
      below,
      below | self,
      ~(below | self),
      ~below,
      self,
      0,  // %clock
      grid.dynamic_shared_bytes,
      0,  // a cluster is one CTA
      1,
      cta.id[0],
      0,
  };
  for (int i = 0; i < kSpecial32; ++i) {
    reinterpret_cast<uint32_t*>(warp.registers)[i * kLanes + lane] = values[i];
  }
  auto* const wide = reinterpret_cast<uint64_t*>(warp.registers + kSpecial32 * kLanes * 4);
  wide[lane] = wide[kLanes + lane] = 0;  // the clocks
}

void begin_warp(Warp& warp, Cta& cta, int index, uint32_t threads) {
  Kernel const& kernel = *cta.grid->kernel;
  warp.cta = &cta;
  warp.grid = cta.grid;
  warp.index = index;
  uint32_t const lanes = std::min<uint32_t>(kLanes, threads - index * kLanes);
  warp.alive = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
  warp.register_memory = poisoned(kernel.register_bytes + kAlignment);
  warp.registers = aligned(warp.register_memory.get());
  warp.predicates.assign(kernel.predicates, 0);
  warp.local_bytes_per_lane = (kernel.local_bytes + 15) / 16 * 16;
  warp.local = poisoned(warp.local_bytes_per_lane * kLanes + 1);
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.at[lane] = 0;
    warp.wait[lane] = Wait::kNothing;
    set_special_registers(warp, index * kLanes + lane, lane);
  }
}

std::unique_ptr<Cta> begin_cta(Grid& grid, uint64_t number) {
  auto cta = std::make_unique<Cta>();
  cta->grid = &grid;
  cta->id[0] = number % grid.size[0];
  cta->id[1] = number / grid.size[0] % grid.size[1];
  cta->id[2] = number / grid.size[0] / grid.size[1];
  uint32_t const fixed = grid.kernel->static_shared_bytes;
  cta->shared_bytes = fixed == 0 ? grid.dynamic_shared_bytes : kStaticSharedBegin + fixed;
  uint64_t const view = (cta->shared_bytes + kAlignment - 1) / kAlignment * kAlignment;
  cta->memory = poisoned(2 * view + kAlignment);
  cta->shared = aligned(cta->memory.get()) - kSharedBegin;
  cta->async_shared = grid.is_strict() ? cta->shared + view : cta->shared;
  uint32_t const threads = grid.block[0] * grid.block[1] * grid.block[2];
  cta->warps = std::vector<Warp>((threads + kLanes - 1) / kLanes);
  for (size_t i = 0; i < cta->warps.size(); ++i) {
    begin_warp(cta->warps[i], *cta, static_cast<int>(i), threads);
  }
  return cta;
}

void check_end(Cta const& cta) {
  char const* what = cta.arriving.empty() ? nullptr : "TMA loads";
  for (Warp const& warp : cta.warps) {
    if (!warp.bulk_stores.is_empty()) what = "bulk stores that read shared memory";
    if (!warp.wgmma.is_empty()) what = "WGMMAs";
  }
  if (what != nullptr) {
    fail("%s: CTA %u ends while there are %s on their way", cta.grid->kernel->name.c_str(),
         cta.id[0], what);
  }
}

// The lanes that execute the next instruction together: those that are furthest behind.
struct Group {
  int at = kNowhere;
  uint32_t mask = 0;
  int others = kNowhere;  // where the next lanes are, which may join
};

Group next_group(Warp& warp) {
  Group group;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((warp.alive >> lane & 1) == 0) continue;
    if (warp.wait[lane] == Wait::kMbarrier &&
        warp.cta->mbarrier(warp.awaited_mbarrier[lane]).has_completed(warp.awaited_parity[lane])) {
      warp.wait[lane] = Wait::kNothing;
    }
    if (warp.wait[lane] == Wait::kKernelBefore && warp.grid->awaited == nullptr) {
      warp.wait[lane] = Wait::kNothing;
    }
    if (warp.wait[lane] == Wait::kNothing) group.at = std::min(group.at, warp.at[lane]);
  }
  if (group.at == kNowhere) return group;
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((warp.alive >> lane & 1) == 0) continue;
    bool const can_join = warp.wait[lane] == Wait::kNothing || warp.wait[lane] == Wait::kLanes;
    if (warp.at[lane] == group.at && can_join) {
      group.mask |= 1u << lane;
      warp.wait[lane] = Wait::kNothing;
    } else if (warp.at[lane] > group.at) {
      group.others = std::min(group.others, warp.at[lane]);
    }
  }
  return group;
}

void set_at(Warp& warp, uint32_t mask, int at) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (mask >> lane & 1) warp.at[lane] = at;
  }
}

bool any_waits(Warp const& warp, uint32_t mask) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask & warp.alive) >> lane & 1 && warp.wait[lane] != Wait::kNothing) return true;
  }
  return false;
}

// Executes an instruction for those lanes of a group that its guard lets through. Returns false if
// the group has to be formed anew: lanes have moved or wait. `count` grows unless they wait.
bool execute(Warp& warp, Instruction const& instruction, Group const& group, uint64_t& count) {
  uint32_t mask = group.mask;
  if (instruction.guard >= 0) {
    uint32_t const guard = warp.predicates[instruction.guard];
    mask &= instruction.guard_negated ? ~guard : guard;
  }
  ++count;
  if (mask == 0) return true;
  if (!warp.loads.empty() && warp.touches_a_load(instruction)) warp.finish_loads();
  warp.has_moved = false;
  if (instruction.may_block) set_at(warp, group.mask, group.at);
  instruction.execute(warp, instruction, mask);
  if (!warp.has_moved) return true;
  set_at(warp, group.mask & ~mask, group.at + 1);
  if (any_waits(warp, mask)) --count;
  return false;
}

// Runs a warp until it can go no further or has had its turn. Returns how many instructions it has
// executed.
uint64_t take_turn(Warp& warp, uint64_t limit) {
  std::vector<Instruction> const& code = warp.grid->kernel->code;
  uint64_t count = 0;
  warp.ends_turn = false;
  warp.sleeps = false;
  while (!warp.ends_turn && count < limit) {
    Group group = next_group(warp);
    if (group.at == kNowhere) break;
    bool together = true;
    while (together && group.at != group.others && !warp.ends_turn && count < limit) {
      if (group.at >= static_cast<int>(code.size())) fail("%s: past the end", where(warp).c_str());
      together = execute(warp, code[group.at], group, count);
      if (together) ++group.at;
    }
    if (together) set_at(warp, group.mask, group.at);
  }
  return count;
}

char const* text_of(Wait wait) {
  switch (wait) {
    case Wait::kNothing:
      return "can go on";
    case Wait::kLanes:
      return "waits for lanes of its warp";
    case Wait::kBarrier:
      return "waits at a barrier";
    case Wait::kMbarrier:
      return "waits for an mbarrier";
    case Wait::kWarpgroup:
      return "waits for warps of its warpgroup";
    case Wait::kKernelBefore:
      return "waits for the kernel before";
  }
  return "";
}

void print_state(Cta& cta) {
  for (Warp const& warp : cta.warps) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if ((warp.alive >> lane & 1) == 0) continue;
      bool const is_like_last = lane > 0 && (warp.alive >> (lane - 1) & 1) &&
                                warp.at[lane] == warp.at[lane - 1] &&
                                warp.wait[lane] == warp.wait[lane - 1];
      if (is_like_last) continue;
      Instruction const& instruction = cta.grid->kernel->code[warp.at[lane]];
      std::fprintf(stderr, "CTA %u warp %d lane %d at PTX line %d, %s: %s", cta.id[0], warp.index,
                   lane, instruction.line, instruction.opcode().c_str(), text_of(warp.wait[lane]));
      if (warp.wait[lane] == Wait::kMbarrier) {
        Mbarrier const& barrier = cta.mbarrier(warp.awaited_mbarrier[lane]);
        std::fprintf(
            stderr, " at %u: parity %u, in phase %llu, without %lld of %u arrivals and %lld bytes",
            warp.awaited_mbarrier[lane], warp.awaited_parity[lane],
            static_cast<unsigned long long>(barrier.phase), static_cast<long long>(barrier.pending),
            barrier.count, static_cast<long long>(barrier.bytes));
      }
      std::fprintf(stderr, "\n");
    }
  }
  for (int number = 0; number < 16; ++number) {
    NamedBarrier const& barrier = cta.barriers[number];
    if (barrier.arrived == 0) continue;
    std::fprintf(stderr, "CTA %u barrier %d: %u of %u threads\n", cta.id[0], number,
                 barrier.arrived, barrier.expected);
  }
}

// One job that is on its way, any.
void deliver(Cta& cta, uint64_t number) {
  auto const which = cta.arriving.begin() + static_cast<int64_t>(number % cta.arriving.size());
  Job const job = std::move(*which);
  cta.arriving.erase(which);
  job();
}

// Every warp of a CTA takes a turn. Returns whether something happened.
bool take_turns(Cta& cta) {
  Grid& grid = *cta.grid;
  bool const is_random = grid.timing == Timing::kRandom;
  uint64_t const first = is_random ? grid.random() : 0;
  bool went_on = false;
  for (size_t i = 0; i < cta.warps.size(); ++i) {
    Warp& warp = cta.warps[(first + i) % cta.warps.size()];
    if (warp.alive == 0) continue;
    for (Wait& wait : warp.wait) {
      if (wait == Wait::kWarpgroup) wait = Wait::kNothing;
    }
    if (is_random && grid.random() % 3 == 0) {
      went_on = true;  // it sleeps
    } else {
      uint64_t const limit = is_random ? 1 + grid.random() % kShortTurn : kTurn;
      // A warp that asks for something again and again, and sleeps between, is as one that stands
      // at a barrier: a turn from one sleep to the next is none.
      bool const slept = warp.sleeps;
      went_on |= take_turn(warp, limit) > 0 && !(slept && warp.sleeps);
    }
  }
  if (is_random && !cta.arriving.empty() && grid.random() % 2 == 0) {
    deliver(cta, grid.random());
    went_on = true;
  }
  return went_on;
}

bool has_ended(Cta const& cta) {
  return std::all_of(cta.warps.begin(), cta.warps.end(),
                     [](Warp const& warp) { return warp.alive == 0; });
}

}  // namespace

std::string where(Warp const& warp) {
  int at = kNowhere;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (warp.alive >> lane & 1) at = std::min(at, warp.at[lane]);
  }
  Kernel const& kernel = *warp.grid->kernel;
  int const line = at < static_cast<int>(kernel.code.size()) ? kernel.code[at].line : 0;
  return kernel.name + ", CTA " + std::to_string(warp.cta->id[0]) + ", warp " +
         std::to_string(warp.index) + ", behind PTX line " + std::to_string(line);
}

void LateStores::take_back() {
  for (auto store = stores.rbegin(); store != stores.rend(); ++store) {
    std::copy(store->before.begin(), store->before.end(), store->place);
  }
}

void LateStores::make() {
  for (Store const& store : stores) std::copy(store.after.begin(), store.after.end(), store.place);
}

void Grid::start_kernel_after() { records = is_strict(); }

// Copies that were started before read what was there before.
void Grid::end_kernel_before() {
  if (awaited == nullptr) return;
  for (std::unique_ptr<Cta>& cta : ctas) {
    while (!cta->arriving.empty()) deliver(*cta, 0);
  }
  awaited->make();
  awaited = nullptr;
}

void run(Grid& grid, int resident_ctas) {
  uint64_t const count = uint64_t(grid.size[0]) * grid.size[1] * grid.size[2];
  uint64_t next = 0;
  int rounds_since_arrival = 0;
  std::vector<std::unique_ptr<Cta>>& ctas = grid.ctas;
  while (next < count || !ctas.empty()) {
    while (next < count && static_cast<int>(ctas.size()) < resident_ctas) {
      ctas.push_back(begin_cta(grid, next++));
    }
    bool went_on = false;
    for (std::unique_ptr<Cta>& cta : ctas) went_on |= take_turns(*cta);
    auto const ended = [&](std::unique_ptr<Cta> const& cta) {
      if (!has_ended(*cta)) return false;
      check_end(*cta);
      return true;
    };
    ctas.erase(std::remove_if(ctas.begin(), ctas.end(), ended), ctas.end());
    if (grid.timing == Timing::kRandom && grid.random() % kRoundsOfKernelBefore == 0) {
      went_on |= grid.awaited != nullptr;  // whoever waited for it can go on
      grid.end_kernel_before();
    }
    rounds_since_arrival = went_on ? rounds_since_arrival + 1 : 0;
    if (went_on && rounds_since_arrival < kLongestWait) continue;
    rounds_since_arrival = 0;
    bool delivered = false;
    for (std::unique_ptr<Cta>& cta : ctas) {
      if (cta->arriving.empty()) continue;
      deliver(*cta, 0);
      delivered = true;
    }
    bool const others_wait = !delivered && grid.awaited != nullptr;
    if (others_wait) grid.end_kernel_before();
    if (delivered || went_on || others_wait) continue;
    for (std::unique_ptr<Cta>& cta : ctas) print_state(*cta);
    fail("%s: a deadlock", grid.kernel->name.c_str());
  }
}

void run_behind(Grid& grid, int resident_ctas, LateStores& before) {
  if (grid.begins_early && !before.stores.empty() && grid.is_late()) {
    before.take_back();
    grid.awaited = &before;
  }
  run(grid, resident_ctas);
  if (grid.awaited != nullptr) {
    fail("%s: ends, and has not waited for the kernel before", grid.kernel->name.c_str());
  }
  before = std::move(grid.recorded);
  before.of_early_kernel = grid.begins_early;
}

}  // namespace cute_attention::emulator
