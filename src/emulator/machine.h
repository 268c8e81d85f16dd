// emulator/machine.h: what a launch consists of, a grid of CTAs with their warps, shared memory and
// barriers, and the work that is on its way beside the warps.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "emulator/ptx.h"

namespace cute_attention::emulator {

struct Grid;
struct Cta;
struct NamedBarrier;

// When asynchronous work is done, and in which order warps take turns. A kernel that is right is
// right in all three ways.
enum class Timing : uint8_t {
  kPrompt,  // at once
  // As late as it may be: WGMMA and copies read and write when they are waited for, TMA when no
  // warp can go on (or all that do have long waited for another CTA), loads of shared memory when
  // their result is used. What generic stores have written is seen by WGMMA and TMA only behind a
  // proxy fence.
  kLate,
  kRandom,  // at any time between, and warps are interrupted anywhere
};

// What lanes wait for.
enum class Wait : uint8_t { kNothing, kLanes, kBarrier, kMbarrier, kWarpgroup, kKernelBefore };

// Work that is on its way.
using Job = std::function<void()>;

// Jobs in the order of their issue, and the groups that were committed. A kernel waits until at
// most so many groups are not done.
struct JobGroups {
  std::vector<Job> issued;
  std::deque<std::vector<Job>> groups;

  void commit();
  void finish_oldest();
  void finish_all_but(uint64_t count);
  bool is_empty() const { return issued.empty() && groups.empty(); }
};

// Bytes of shared memory.
struct SharedRange {
  uint32_t begin;
  uint32_t bytes;
};

// A load of shared memory whose result has not been used.
struct PendingLoad {
  std::vector<uint32_t> registers;
  Job job;
};

struct Warp {
  Cta* cta = nullptr;
  Grid* grid = nullptr;
  int index = 0;
  uint32_t alive = 0;  // lanes that have not left the kernel

  std::unique_ptr<uint8_t[]> register_memory;
  uint8_t* registers = nullptr;  // aligned
  std::vector<uint32_t> predicates;
  std::unique_ptr<uint8_t[]> local;
  uint64_t local_bytes_per_lane = 0;

  int at[kLanes];  // each lane's next instruction
  Wait wait[kLanes];
  NamedBarrier* awaited_barrier = nullptr;
  uint32_t awaited_mbarrier[kLanes];
  uint32_t awaited_parity[kLanes];
  bool has_moved = false;     // the instruction has set `at`, or has blocked lanes
  bool ends_turn = false;     // others shall run now
  bool sleeps = false;        // its turn has ended with nanosleep
  bool was_released = false;  // from a barrier at which it now executes the same instruction again

  JobGroups wgmma;
  uint64_t wgmma_committed = 0;
  uint64_t wgmma_finished = 0;
  JobGroups bulk_stores;
  JobGroups copies;  // cp.async

  std::vector<PendingLoad> loads;
  std::vector<SharedRange> unfenced;  // what generic stores have written since the last proxy fence

  void finish_loads();
  bool touches_a_load(Instruction const& instruction) const;
};

// A hardware barrier of `bar` instructions.
struct NamedBarrier {
  uint32_t arrived = 0;   // threads
  uint32_t expected = 0;  // 0 while none has arrived
  bool any = false;       // bar.red.or so far, and of the last phase
  bool any_of_last = false;
  std::vector<Warp*> participants;
};

struct Mbarrier {
  uint32_t count = 0;
  int64_t pending = 0;
  int64_t bytes = 0;  // that are to come
  uint64_t phase = 0;

  bool has_completed(uint32_t parity) const { return (phase & 1) != parity; }
};

struct Cta {
  Grid* grid = nullptr;
  uint32_t id[3];
  std::unique_ptr<uint8_t[]> memory;
  uint32_t shared_bytes = 0;
  // Shared memory as generic instructions see it, and as WGMMA and TMA do. Index: the address.
  uint8_t* shared = nullptr;
  uint8_t* async_shared = nullptr;
  std::vector<SharedRange> unfenced;  // writes that a barrier has shown to other warps

  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::map<uint32_t, Mbarrier> mbarriers;  // by address
  std::deque<Job> arriving;                // TMA loads

  Mbarrier& mbarrier(uint32_t address);
  void arrive(uint32_t address, int64_t arrivals, int64_t bytes);
  bool contains(uint32_t address, uint64_t bytes) const;
  void wrote(Warp& warp, uint32_t address, uint32_t bytes);  // by a generic store
  void fence(Warp& warp);                                    // fence.proxy.async
};

// What a kernel has written to global memory, for the kernel that begins before its end.
struct LateStores {
  struct Store {
    uint8_t* place;
    std::vector<uint8_t> before, after;
  };
  std::vector<Store> stores;
  bool of_early_kernel = false;  // of one that has itself begun early

  void take_back();
  void make();  // again, in their order
};

struct Grid {
  Kernel const* kernel = nullptr;
  uint32_t size[3];
  uint32_t block[3];
  uint32_t dynamic_shared_bytes = 0;
  uint32_t multiprocessors = 0;
  uint8_t* parameters = nullptr;
  Timing timing = Timing::kPrompt;
  std::mt19937_64 random;
  bool begins_early = false;               // before the end of the kernel before
  bool records = false;                    // what it writes, since the next kernel may begin
  LateStores recorded;                     // they
  LateStores* awaited = nullptr;           // of the kernel before, until that one ends
  std::vector<std::unique_ptr<Cta>> ctas;  // that run

  void start_kernel_after();
  void end_kernel_before();  // what it wrote can be read

  // Calls write(), which changes `bytes` of global memory at `place`.
  template <class Write>
  void write_global(uint8_t* place, uint64_t bytes, Write const& write) {
    if (!records) {
      write();
      return;
    }
    std::vector<uint8_t> before(place, place + bytes);
    write();
    recorded.stores.push_back({place, std::move(before), {place, place + bytes}});
  }
  bool is_late() {
    return timing == Timing::kLate || (timing == Timing::kRandom && random() % 4 != 0);
  }
  bool is_strict() const { return timing != Timing::kPrompt; }
};

// Runs a grid to its end, so many CTAs at a time; fails on a deadlock, and where a CTA ends with
// work on its way.
void run(Grid& grid, int resident_ctas);

// Runs a grid behind a kernel that has written `before`, and leaves there what it has written
// itself. Where asynchronous work is late, a grid that begins early does not see `before` until
// that kernel ends: as late as it may, when no warp can go on that does not wait for it.
void run_behind(Grid& grid, int resident_ctas, LateStores& before);

// Where a warp is, for messages.
std::string where(Warp const& warp);

}  // namespace cute_attention::emulator
