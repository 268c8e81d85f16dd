// test_grad_bias_walk.cpp: which tiles of scores a CTA of a kernel for the gradient of a bias
// visits and which it passes, what changes between two visits, and that the rings of the sm90
// kernel give each chunk the buffer that both sides count to, and never wait for each other.
#include "layouts/host_cuda.h"

// A warp of one thread.
template <>
int __shfl_sync<int>(unsigned, int value, int, int) {
  return value;
}

// The headers below need what is above.
#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "cute_attention/core/grad_bias_walk.h"
#include "cute_attention/sm90/grad_bias_traits.h"
#include "kernels/row.h"

namespace cute_attention {
namespace rows {
CUTE_ATTENTION_BACKWARD(of_64, Sm90, Float16, 64, 64, Bias, 64, 128, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(of_128, Sm90, Float16, 128, 128, Bias, 64, 128, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(of_256, Sm90, Float16, 256, 256, Bias, 128, 64, 2, 12, O3)
CUTE_ATTENTION_BACKWARD(of_every, Sm90, Float16, 256, 256, Softcap | Alibi | Bias | Dropout, 128,
                        64, 2, 12, O3)
}  // namespace rows
namespace {

using testing::check;
using testing::check_equal;

using Block = std::tuple<int, int, int, int>;
Block of(ScoreBlock const& block) {
  return {block.batch, block.head, block.m_block, block.n_block};
}

constexpr int kTile = 128;

// A call whose gradient keeps the dimensions of the bits of `kept`: 1 batch, 2 heads, 4 queries, 8
// keys. Two query heads share a KV head.
BackwardParams call(int kept, int seqlen_q, int seqlen_k, int window_left, int window_right) {
  BackwardParams params{};
  params.batch = 3;
  params.heads = 4;
  params.heads_kv = 2;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.window_left = window_left;
  params.window_right = window_right;
  params.grad_bias = {nullptr, kept & 1, kept & 2, kept & 4, (kept & 8) != 0, 0};
  return params;
}

// Whether some query of the tile sees one of its keys, score by score.
bool is_visible(BackwardParams const& params, ScoreBlock const& block) {
  Sequence const sequence = load_sequence(params, block.batch);
  for (int i = block.m_block * kTile; i < (block.m_block + 1) * kTile; ++i) {
    for (int j = block.n_block * kTile; j < (block.n_block + 1) * kTile; ++j) {
      if (i < sequence.seqlen_q && j < sequence.seqlen_k && j >= i + sequence.first_offset &&
          j <= i + sequence.last_offset) {
        return true;
      }
    }
  }
  return false;
}

// All works of a launch, one after the other: each visible tile is visited once, and in a launch
// without sums each hidden one is told once.
template <bool kSums>
void check_walk(BackwardParams const& params, GradBiasSchedule const& schedule,
                std::string const& what) {
  using Walk = GradBiasWalk<kTile, kTile, kSums>;
  Walk const walk{params, schedule};
  std::map<Block, int> visited, hidden;
  auto const is_visible_there = [&](ScoreBlock const& block) {
    bool const visible = walk.is_visible(block);
    if (!kSums && !visible) ++hidden[of(block)];
    return visible;
  };
  auto const advance = [&](auto& visit) {
    while (walk.move(visit)) {
      if (is_visible_there(Walk::here(visit.block))) return true;
    }
    return false;
  };
  BlockGrid const grad = grad_bias_grid(params, Walk::kTile);
  for (int64_t index = 0; index < grad_bias_ctas(grad, schedule); ++index) {
    GradBiasWork const work = walk.work(index);
    typename Walk::Visit visit{work.first, work.count};
    if (visit.left <= 0 || !(is_visible_there(visit.block) || advance(visit))) {
      continue;
    }
    bool more = true;
    while (more) {
      ScoreBlock const now = visit.block;
      ++visited[of(now)];
      more = advance(visit);
      if (more) {
        auto const changes = walk.changes(now, visit.block);
        bool const queries = now.batch != visit.block.batch || now.head != visit.block.head ||
                             now.m_block != visit.block.m_block;
        bool const keys = now.batch != visit.block.batch || now.head / 2 != visit.block.head / 2 ||
                          now.n_block != visit.block.n_block;
        check(changes.queries == queries && changes.keys == keys, what + ": changes");
      }
    }
  }
  BlockGrid const scores = score_grid(params, Walk::kTile);
  for (int64_t i = 0; i < scores.count(); ++i) {
    ScoreBlock const block = scores.block(i);
    bool const visible = is_visible(params, block);
    check_equal(visited[of(block)], int(visible), what + ": visits of a tile");
    check_equal(hidden[of(block)], int(!kSums && !visible), what + ": tiles of zeros");
  }
  check_equal(visited.size(), size_t(scores.count()), what + ": tiles");
}

void check_walks() {
  std::vector<int32_t> const cu_q{0, 200, 200, 450}, cu_k{0, 130, 400, 401};
  for (bool const packed : {false, true}) {
    for (auto const& [left, right] :
         {std::pair{kUnbounded, kUnbounded}, {kUnbounded, 0}, {40, 9}}) {
      for (int kept = 0; kept < 16; ++kept) {
        BackwardParams params = call(kept, 300, 280, left, right);
        if (packed) {
          params.cu_seqlens_q = cu_q.data();
          params.cu_seqlens_k = cu_k.data();
        }
        std::string const what = "kept " + std::to_string(kept) + (packed ? ", packed" : "");
        for (int parts : {1, 2}) {
          check_walk<true>(params, {true, 1, parts, 2}, what);
        }
        if (kept == 15) {
          for (int run : {1, 2, 3}) {
            check_walk<false>(params, {false, run, 1, 2}, what);
          }
        }
      }
    }
  }
}

// `behind` counts as advance() does.
template <int kStages>
void check_ring() {
  for (uint32_t begin = 0; begin < 2 * kStages; ++begin) {
    sm90::Ring<kStages> const first{begin % kStages, begin / kStages};
    sm90::Ring<kStages> one_by_one = first;
    for (uint32_t count = 0; count <= 3 * kStages; ++count) {
      auto const found = sm90::behind(first, count);
      check(found.stage == one_by_one.stage && found.parity == one_by_one.parity,
            "a buffer behind");
      if (++one_by_one.stage == kStages) {
        one_by_one.stage = 0;
        one_by_one.parity ^= 1;
      }
    }
  }
}

// A ring as its two sides see it: how many chunks were loaded, and how many were released by the
// slowest of the warpgroups.
struct RingCounts {
  int buffers;
  int64_t loaded = 0;
  int64_t released[2] = {};
};

// One side of the kernel as a list of what it does in order.
struct Action {
  enum Kind { Load, Wait, Release } kind;
  bool m;         // of the ring of queries
  int64_t chunk;  // which one of the ring
};

// Goes on until nobody can. Returns whether all lists are done.
bool runs_to_its_end(RingCounts (&rings)[2], std::deque<Action> load,
                     std::vector<std::deque<Action>> consumers) {
  bool moved = true;
  while (moved) {
    moved = false;
    while (!load.empty()) {
      RingCounts& ring = rings[load.front().m];
      if (load.front().chunk >= std::min(ring.released[0], ring.released[1]) + ring.buffers) break;
      ++ring.loaded;
      load.pop_front();
      moved = true;
    }
    for (int w = 0; w < int(consumers.size()); ++w) {
      auto& actions = consumers[w];
      while (!actions.empty()) {
        RingCounts& ring = rings[actions.front().m];
        if (actions.front().kind == Action::Wait && actions.front().chunk >= ring.loaded) break;
        if (actions.front().kind == Action::Release) {
          check_equal(actions.front().chunk, ring.released[w], "released in the order of the ring");
          ++ring.released[w];
        }
        actions.pop_front();
        moved = true;
      }
    }
  }
  return load.empty() && consumers[0].empty() && consumers[1].empty();
}

// Visits with every order of changes: the load warp and the consumers never wait for each other,
// and chunks that the next visit has too are not overwritten.
template <class Traits>
void check_buffers() {
  constexpr int kVisits = 5;
  for (int pattern = 0; pattern < 1 << (2 * kVisits); ++pattern) {
    auto const changes = [&](int visit, bool m) {
      bool const changed = visit == 0 || visit == kVisits || (pattern >> (2 * visit + m) & 1);
      return changed || !(m ? Traits::kKeepsM : Traits::kKeepsN);
    };
    RingCounts rings[2] = {{Traits::kBuffersN}, {Traits::kBuffersM}};
    std::deque<Action> load, consumer;
    int64_t begin[2] = {}, loads[2] = {};
    for (int visit = 0; visit < kVisits; ++visit) {
      for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
        for (bool m : {true, false}) {
          if (changes(visit, m)) load.push_back({Action::Load, m, loads[m]++});
        }
      }
      auto const release = [&](int chunk) {
        for (bool m : {true, false}) {
          if (changes(visit + 1, m)) consumer.push_back({Action::Release, m, begin[m] + chunk});
        }
      };
      for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
        for (bool m : {true, false}) consumer.push_back({Action::Wait, m, begin[m] + chunk});
        if (chunk > 0 && chunk <= Traits::kChunksS) release(chunk - 1);
      }
      for (int chunk = Traits::kChunksS; chunk < Traits::kChunks; ++chunk) release(chunk);
      for (bool m : {true, false}) begin[m] += changes(visit + 1, m) ? Traits::kChunks : 0;
    }
    check(runs_to_its_end(rings, load, {consumer, consumer}), "nobody waits for ever");
  }
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_walks();
  check_ring<1>();
  check_ring<4>();
  check_ring<6>();
  check_ring<8>();
  check_buffers<sm90::GradBiasTraits<rows::of_64, true>>();
  check_buffers<sm90::GradBiasTraits<rows::of_64, false>>();
  check_buffers<sm90::GradBiasTraits<rows::of_128, true>>();
  check_buffers<sm90::GradBiasTraits<rows::of_128, false>>();
  check_buffers<sm90::GradBiasTraits<rows::of_256, true>>();
  check_buffers<sm90::GradBiasTraits<rows::of_256, false>>();
  check_buffers<sm90::GradBiasTraits<rows::of_every, true>>();
  check_buffers<sm90::GradBiasTraits<rows::of_every, false>>();
  return testing::report();
}
