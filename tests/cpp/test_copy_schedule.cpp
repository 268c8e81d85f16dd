// test_copy_schedule.cpp: the forward's copies of K and V (sm80/copy_schedule.h): every tile is
// there for all threads when it is read, and no buffer is written that a thread may still read.
#include <vector>

#include "check.h"
#include "cute_attention/sm80/copy_schedule.h"

namespace {

using cute_attention::testing::check;

struct Buffer {
  int tile = -1;
  bool landed = false;     // for the thread that copied it
  bool visible = false;    // for all threads
  int read_in_phase = -1;  // the phase between two barriers in which it was last read
};

// All threads do the same, so one of them is followed.
struct Machine {
  std::vector<Buffer> q, k, v;
  std::vector<std::vector<Buffer*>> groups;
  std::vector<Buffer*> open;  // copies since the last fence
  int phase = 0;
  int next_k = 0, next_v = 0;

  explicit Machine(int stages) : q(1), k(stages), v(stages) {}

  void copy(Buffer& buffer, int tile) {
    check(buffer.read_in_phase < phase, "no thread may still read what is overwritten");
    buffer = {tile, false, false, buffer.read_in_phase};
    open.push_back(&buffer);
  }
  void read(Buffer& buffer, int tile) {
    check(buffer.tile == tile, "the buffer holds the tile");
    check(buffer.visible, "the tile is there for all threads");
    buffer.read_in_phase = phase;
  }
  Buffer& of(std::vector<Buffer>& buffers, int tile) { return buffers[tile % int(buffers.size())]; }
  void each(void (*change)(Buffer&)) {
    for (auto* buffers : {&q, &k, &v}) {
      for (Buffer& buffer : *buffers) {
        change(buffer);
      }
    }
  }
};

Machine* machine = nullptr;

template <cute_attention::Loads kLoads, int kStages>
void test_schedule(int tiles) {
  using Schedule = cute_attention::sm80::CopySchedule<kLoads, kStages>;
  Machine run(kStages);
  machine = &run;
  // Tiles are counted in the order of the walk.
  auto const keys = [&](auto first) {
    check(decltype(first)::value == (run.next_k == 0), "K knows the first tile");
    run.copy(run.of(run.k, run.next_k), run.next_k);
    ++run.next_k;
    cute::cp_async_fence();
  };
  auto const values = [&](auto first) {
    check(decltype(first)::value == (run.next_v == 0), "V knows the first tile");
    run.copy(run.of(run.v, run.next_v), run.next_v);
    ++run.next_v;
    cute::cp_async_fence();
  };
  run.copy(run.q[0], 0);
  cute::cp_async_fence();
  Schedule::begin(keys, values);
  for (int tile = 0; tile < tiles; ++tile) {
    bool const more = tile + 1 < tiles;
    Schedule::at_scores(tile == 0, more, keys, values);
    run.read(run.q[0], 0);
    run.read(run.of(run.k, tile), tile);
    Schedule::at_output(tile == 0, more, keys, values);
    run.read(run.of(run.v, tile), tile);
  }
  check(run.next_k == tiles, "all tiles of K are copied");
  check(run.next_v == tiles, "all tiles of V are copied");
}

}  // namespace

void recorded::wait(int pending) {
  while (int(machine->groups.size()) > pending) {
    for (Buffer* buffer : machine->groups.front()) {
      buffer->landed = true;
    }
    machine->groups.erase(machine->groups.begin());
  }
}
void recorded::fence() {
  machine->groups.push_back(machine->open);
  machine->open.clear();
}
void recorded::barrier() {
  ++machine->phase;
  machine->each([](Buffer& buffer) { buffer.visible = buffer.landed; });
}

int main() {
  using cute_attention::Loads;
  for (int tiles = 1; tiles <= 7; ++tiles) {
    test_schedule<Loads::Eager, 1>(tiles);
    test_schedule<Loads::Eager, 2>(tiles);
    test_schedule<Loads::Late, 1>(tiles);
  }
  return cute_attention::testing::report();
}
