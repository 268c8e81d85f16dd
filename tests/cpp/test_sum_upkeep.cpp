// test_sum_upkeep.cpp: the sums of dQ that the backward kernel itself keeps. CTAs that take turns
// at random go through all that their warps wait for: each sum is zero before anything is added to
// it, has all of it before dQ is made of it, and nobody waits for ever.
#include "cute_attention/core/sum_upkeep.h"

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "check.h"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

constexpr int kConsumers = 2;  // whose warps add dQ
constexpr int kWorkSlots = 2;  // blocks that a CTA knows at a time

// What a launch keeps of the sums: a number for each tile of queries of each KV head.
struct Sums {
  GradSchedule schedule;
  SumUpkeep upkeep;
  int32_t tiles;  // of all query heads of a KV head
  std::vector<int32_t> counters;
  std::vector<int> added, zeros, written;  // [all_heads, tiles]

  Sums(int32_t all_heads, int32_t per_group, int32_t n_blocks, int32_t tiles)
      : schedule{n_blocks, all_heads, all_heads, per_group, 1},
        upkeep{},
        tiles(tiles),
        counters(size_t(2 * all_heads)),
        added(size_t(all_heads * tiles)),
        zeros(added),
        written(added) {
    upkeep = {per_group, all_heads, counters.data()};
    for (int32_t head = 0; head < all_heads; ++head) {
      for (int32_t tile = 0; upkeep.begins_before(head) && tile < tiles; ++tile) {
        zeros[size_t(head * tiles + tile)] += 1;  // the kernel before
      }
    }
  }

  template <class Use>
  void each_of_slice(int32_t head, int32_t n_block, Use const& use) {
    SumSlice const own = sum_slice(tiles, n_block, schedule.n_blocks);
    for (int32_t tile = own.begin; tile < own.end; ++tile) {
      use(size_t(head * tiles + tile));
    }
  }
};

// A CTA: its loading warp, the warps that add, and the one that keeps sums. Each call of step()
// does what one of them can do next.
struct Cta {
  struct Block {
    GradTile tile;
    int adders_done = 0;
    bool was_read = false;  // by the warp that keeps sums
  };
  std::deque<Block> slots;
  std::deque<GradTile> kept;  // by the warp that keeps sums: the one that it works on
  bool cleared = false;

  // Whether anything was done.
  bool step(Sums& sums, int32_t& next, int which) {
    SumUpkeep const& upkeep = sums.upkeep;
    if (which == 0) {
      if (int(slots.size()) == kWorkSlots || next >= int32_t(sums.schedule.tiles())) {
        return false;
      }
      slots.push_back({sums.schedule.tile(next++)});
      return true;
    }
    if (which == 1) {
      for (Block& block : slots) {
        if (block.adders_done == kConsumers) {
          continue;
        }
        int32_t const head = block.tile.head_kv;
        if (!upkeep.begins_before(head) &&
            *upkeep.slices_of_zeros(head) != sums.schedule.n_blocks) {
          return false;
        }
        for (int32_t tile = 0; tile < sums.tiles; ++tile) {  // of all queries
          size_t const place = size_t(head * sums.tiles + tile);
          check(sums.zeros[place] == 1 && sums.written[place] == 0, "added to what is kept");
          sums.added[place] += 1;
        }
        ++block.adders_done;
        if (!upkeep.ends_after(head)) {
          ++*upkeep.added_parts(head);
        }
        free_slot();
        return true;
      }
      return false;
    }
    if (kept.empty()) {
      for (Block& block : slots) {
        if (!block.was_read) {
          block.was_read = true;
          kept.push_back(block.tile);
          cleared = false;
          free_slot();
          return true;
        }
      }
      return false;
    }
    GradTile const tile = kept.front();
    int32_t const head = tile.head_kv;
    if (!cleared) {
      if (head + upkeep.per_group < upkeep.all_heads) {
        int32_t const later = head + upkeep.per_group;
        sums.each_of_slice(later, tile.n_block, [&](size_t place) {
          check_equal(sums.added[place], 0, "set to zero before all additions");
          sums.zeros[place] += 1;
        });
        ++*upkeep.slices_of_zeros(later);
      }
      cleared = true;
      return true;
    }
    if (head >= upkeep.per_group) {
      int32_t const before = head - upkeep.per_group;
      if (*upkeep.added_parts(before) != sums.schedule.n_blocks * kConsumers) {
        return false;
      }
      sums.each_of_slice(before, tile.n_block, [&](size_t place) {
        check_equal(sums.added[place], sums.schedule.n_blocks * kConsumers, "all was added");
        sums.written[place] += 1;
      });
    }
    kept.pop_front();
    return true;
  }

  void free_slot() {
    while (!slots.empty() && slots.front().adders_done == kConsumers && slots.front().was_read) {
      slots.pop_front();
    }
  }
  bool is_done() const { return slots.empty() && kept.empty(); }
};

void run(int32_t all_heads, int32_t per_group, int32_t n_blocks, int32_t tiles, int ctas,
         uint32_t seed) {
  std::string const what = std::to_string(all_heads) + " heads in groups of " +
                           std::to_string(per_group) + ", " + std::to_string(n_blocks) +
                           " blocks, " + std::to_string(tiles) + " tiles, " + std::to_string(ctas) +
                           " CTAs";
  Sums sums(all_heads, per_group, n_blocks, tiles);
  std::vector<Cta> all(static_cast<size_t>(ctas));
  std::mt19937 random(seed);
  int32_t next = 0;
  auto const done = [&] {
    return next >= int32_t(sums.schedule.tiles()) &&
           std::all_of(all.begin(), all.end(), [](Cta const& cta) { return cta.is_done(); });
  };
  while (!done()) {
    bool moved = false;
    std::vector<size_t> order(3 * all.size());
    for (size_t i = 0; i < order.size(); ++i) {
      order[i] = i;
    }
    std::shuffle(order.begin(), order.end(), random);
    for (size_t const one : order) {
      if (random() % 2 == 0) {  // some are slow
        continue;
      }
      moved = all[one / 3].step(sums, next, int(one % 3)) || moved;
    }
    if (!moved) {
      for (size_t const one : order) {
        moved = all[one / 3].step(sums, next, int(one % 3)) || moved;
      }
      if (!check(moved, what + ": nobody waits for ever")) {
        return;
      }
    }
  }
  for (int32_t head = 0; head < all_heads; ++head) {
    for (int32_t tile = 0; tile < tiles; ++tile) {
      size_t const place = size_t(head * tiles + tile);
      int const by_kernel_after = sums.upkeep.ends_after(head) ? 1 : 0;
      if (!check_equal(sums.written[place] + by_kernel_after, 1, what + ": dQ is written once") ||
          !check_equal(sums.zeros[place], 1, what + ": set to zero once")) {
        return;
      }
    }
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  SumUpkeep const none{};
  testing::check(!none.is_used() && none.begins_before(7) && none.ends_after(0), "no upkeep");
  uint32_t seed = 0;
  for (int const all_heads : {2, 3, 7, 12}) {
    for (int const per_group : {1, 2, 3, 5}) {
      if (per_group >= all_heads) {
        continue;
      }
      for (int const n_blocks : {1, 3, 4}) {
        for (int const tiles : {1, 2, 4, 9}) {
          for (int const ctas : {1, 2, 5, 16}) {
            run(all_heads, per_group, n_blocks, tiles, ctas, ++seed);
          }
        }
      }
    }
  }
  return testing::report();
}
