// cp.async: copies from global to shared memory that a thread waits for.
#include <cstring>

#include "emulator/memory.h"

namespace cute_attention::emulator {
namespace {

// cp.async [shared], [global], bytes(, bytes that are read: the others are 0)
void copy(Warp& warp, Instruction const& instruction, uint32_t mask) {
  auto const& operands = instruction.operands;
  for_lanes(mask, [&](int lane) {
    uint64_t const shared = address_of(warp, operands[0], lane);
    uint64_t const global = address_of(warp, operands[1], lane);
    auto const bytes = static_cast<uint32_t>(value_of(warp, operands[2], lane));
    auto const read =
        operands.size() > 3 ? static_cast<uint32_t>(value_of(warp, operands[3], lane)) : bytes;
    uint8_t* const target = bytes_at(warp, instruction, kShared, shared, bytes, lane);
    uint8_t const* const data =
        read > 0 ? bytes_at(warp, instruction, kGlobal, global, bytes, lane) : nullptr;
    Warp* const self = &warp;
    Job const job = [=] {
      store_shared(*self, shared, bytes);
      std::memset(target, 0, bytes);
      if (read > 0) std::memcpy(target, data, read);
    };
    if (warp.grid->is_strict()) {
      warp.copies.issued.push_back(job);
    } else {
      job();
    }
  });
}

void commit(Warp& warp, Instruction const&, uint32_t) { warp.copies.commit(); }

void wait(Warp& warp, Instruction const& instruction, uint32_t mask) {
  bool const for_all = instruction.operands.empty();
  if (for_all) warp.copies.commit();
  uint64_t const may_remain =
      for_all ? 0 : value_of(warp, instruction.operands[0], first_lane(mask));
  warp.copies.finish_all_but(may_remain);
}

// cp.async.mbarrier.arrive.noinc [address]: an arrival behind the copies of this thread so far.
void arrive_behind_copies(Warp& warp, Instruction const& instruction, uint32_t mask) {
  Cta* const cta = warp.cta;
  warp.copies.commit();
  std::deque<std::vector<Job>> const groups = std::move(warp.copies.groups);
  warp.copies.groups.clear();
  std::vector<uint32_t> barriers;
  for_lanes(mask, [&](int lane) {
    uint64_t const address = address_of(warp, instruction.operands[0], lane);
    barriers.push_back(static_cast<uint32_t>(address));
  });
  Job const job = [=] {
    for (std::vector<Job> const& group : groups) {
      for (Job const& copy : group) copy();
    }
    for (uint32_t const barrier : barriers) cta->arrive(barrier, 1, 0);
  };
  if (warp.grid->is_late()) {
    cta->arriving.push_back(job);
  } else {
    job();
  }
}

}  // namespace

Execute decode_async_copy(Instruction& instruction) {
  std::vector<std::string> const& words = instruction.words;
  if (words[0] != "cp" || words[1] != "async") return nullptr;
  if (instruction.has("mbarrier")) {
    return instruction.has("noinc") ? arrive_behind_copies : nullptr;
  }
  if (instruction.has("commit_group")) return commit;
  if (instruction.has("wait_group") || instruction.has("wait_all")) return wait;
  return copy;
}

}  // namespace cute_attention::emulator
