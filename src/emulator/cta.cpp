#include <algorithm>
#include <cstring>

#include "emulator/machine.h"

namespace cute_attention::emulator {

void JobGroups::commit() {
  groups.push_back(std::move(issued));
  issued.clear();
}

void JobGroups::finish_oldest() {
  for (Job const& job : groups.front()) job();
  groups.pop_front();
}

void JobGroups::finish_all_but(uint64_t count) {
  while (groups.size() > count) finish_oldest();
}

void Warp::finish_loads() {
  for (PendingLoad const& load : loads) load.job();
  loads.clear();
}

bool Warp::touches_a_load(Instruction const& instruction) const {
  return std::any_of(loads.begin(), loads.end(), [&](PendingLoad const& load) {
    return std::find_first_of(load.registers.begin(), load.registers.end(),
                              instruction.registers.begin(),
                              instruction.registers.end()) != load.registers.end();
  });
}

Mbarrier& Cta::mbarrier(uint32_t address) {
  auto const found = mbarriers.find(address);
  if (found == mbarriers.end()) {
    fail("%s: no mbarrier at shared address %u", grid->kernel->name.c_str(), address);
  }
  return found->second;
}

void Cta::arrive(uint32_t address, int64_t arrivals, int64_t bytes) {
  Mbarrier& barrier = mbarrier(address);
  barrier.bytes += bytes;
  barrier.pending -= arrivals;
  if (barrier.pending < 0) {
    fail("%s: more than the %u arrivals of the mbarrier at shared address %u",
         grid->kernel->name.c_str(), barrier.count, address);
  }
  if (barrier.pending == 0 && barrier.bytes == 0) {
    ++barrier.phase;
    barrier.pending = barrier.count;
  }
}

bool Cta::contains(uint32_t address, uint64_t bytes) const {
  return address >= kSharedBegin && address + bytes <= kSharedBegin + shared_bytes;
}

void Cta::wrote(Warp& warp, uint32_t address, uint32_t bytes) {
  if (!grid->is_strict()) return;
  warp.unfenced.push_back({address, bytes});
}

void Cta::fence(Warp& warp) {
  for (std::vector<SharedRange>* ranges : {&warp.unfenced, &unfenced}) {
    for (SharedRange const& range : *ranges) {
      std::memcpy(async_shared + range.begin, shared + range.begin, range.bytes);
    }
    ranges->clear();
  }
  warp.finish_loads();
}

}  // namespace cute_attention::emulator
