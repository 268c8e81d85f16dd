// core/grad_parts.h: the backward pass where there are few blocks of keys. A CTA computes dK and dV
// of a block of keys in one step for each tile of queries of each query head of the group. If there
// are fewer blocks than CTAs that can run, the steps of each block are divided into parts. Each
// part is computed by another CTA, which writes its own sums of dK and dV to the workspace; the
// kernel after the backward adds them up (core/part_sums.h).
#pragma once

#include <cute/config.hpp>
#include <initializer_list>

#include "cute_attention/core/block_tiles.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention {

// The steps of one part: which query heads it goes through, which step is the first one, and how
// many there are.
struct StepRange {
  int32_t head_begin;  // the query heads are [head_begin, head_end)
  int32_t head_end;
  StepOrder order;
  int32_t head;     // query head of the first step
  int32_t m_block;  // tile of queries of the first step
  int32_t count;    // may be 0: then the others mean nothing
};

// Nothing is divided.
constexpr StepParts whole_blocks(BackwardParams const& params) {
  int32_t const group = params.heads_kv > 0 ? params.heads / params.heads_kv : 1;
  return make_step_parts(group, group, 1);
}

// `parts` parts, or a few less: bundles of whole heads, and pieces of these where there are more
// parts than heads.
constexpr StepParts parts_of_heads(int32_t group, int32_t parts) {
  return make_step_parts(group, ceil_div(group, parts), max_of(parts / group, 1));
}

// `parts` pieces of all heads together: about equal, whatever the number of heads is.
constexpr StepParts parts_of_all(int32_t group, int32_t parts) {
  return make_step_parts(group, group, parts);
}

// How many steps the longest part has, of a block of keys that needs `tiles` tiles of queries of
// each query head.
CUTE_HOST_DEVICE constexpr int32_t longest_part(int32_t tiles, StepParts const& of) {
  return ceil_div(tiles * of.bundle, of.pieces);
}

// How many pieces of a bundle have steps.
CUTE_HOST_DEVICE constexpr int32_t pieces_with_steps(int32_t tiles, StepParts const& of) {
  return tiles == 0 || of.group == 0 ? 0 : (tiles * of.bundle - 1) / longest_part(tiles, of) + 1;
}

// How many of the parts have steps. These are the first ones; only their sums are written.
CUTE_HOST_DEVICE constexpr int32_t parts_with_steps(int32_t tiles, StepParts const& of) {
  return of.group == 0 ? 0 : ceil_div(of.group, of.bundle) * pieces_with_steps(tiles, of);
}

// The steps of part `tile.part` of a block of keys that needs the tiles of queries `tiles`, each of
// them of all query heads of the group.
CUTE_HOST_DEVICE constexpr StepRange steps_of_part(MTiles const& tiles, GradTile const& tile,
                                                   StepParts const& of,
                                                   StepOrder order = StepOrder::Down) {
  int32_t const pieces = pieces_with_steps(tiles.count(), of);
  int32_t const first = pieces == 0 ? of.group : tile.part / pieces * of.bundle;
  if (first >= of.group) {
    return {0, 0, order, 0, 0, 0};
  }
  int32_t const heads = min_of(of.bundle, of.group - first);
  int32_t const longest = longest_part(tiles.count(), of);
  int32_t const begin = tile.part % pieces * longest;
  int32_t const head = tile.head_kv * of.group + first;
  bool const by_heads = order == StepOrder::HeadAfterHead;
  int32_t const inner = by_heads ? tiles.count() : heads;  // steps of a head, or of a tile
  int32_t const heads_before = by_heads ? begin / inner : begin % inner;
  int32_t const tiles_before = by_heads ? begin % inner : begin / inner;
  return {head,
          head + heads,
          order,
          head + heads_before,
          order == StepOrder::Up ? tiles.begin + tiles_before : tiles.end - 1 - tiles_before,
          min_of(longest, heads * tiles.count() - begin)};
}

// What a part takes beside its steps, in steps: kBlockSteps to load K, V and the first queries, and
// to add the last dQ; kPartSteps to write its sums of dK and dV. To add up the sums of a part, the
// kernel after takes as long as a step of kSumQueries queries would: of keys and head dim there are
// as many in the sums as in a step, so one number serves all rows.
constexpr double kBlockSteps = 1, kPartSteps = 2, kSumQueries = 256;

// Estimates how long the backward takes, in steps, where each of `blocks` blocks of keys is divided
// into parts as `of` says, a step has `tile_m` queries, and `ctas` CTAs run at the same time. The
// longest parts come first, and a CTA takes the next part when it is free. Then the backward takes
// about as long as the largest of these lower bounds: the average time of a CTA; the longest part;
// and, for each k, k times a part of the block that has part number (k - 1) * ctas + 1, counted
// from the longest, since some CTA has k of the parts up to it.
//
// The constants were chosen for 200 backward calls of 22 shapes, each with every number of parts of
// either kind (NVIDIA H100, bf16, causal, head dims 64 and 128): the numbers that they choose take
// 1.01 times as long as the best ones in the mean, and 1.07 at worst.
constexpr double estimate_steps(BlockTiles const& of_blocks, int64_t blocks, StepParts const& of,
                                int64_t ctas, int32_t tile_m) {
  bool const divided = of.count > 1;
  double const overhead = divided ? kBlockSteps + kPartSteps : kBlockSteps;
  auto const mean_part = [&](int32_t sample) {
    double const steps = double(of_blocks.tiles[sample]) * of.group;
    return steps == 0 ? 0 : steps / of.count + overhead;
  };
  int64_t const all_parts = blocks * of.count;
  double sum = 0;
  for (int32_t i = 0; i < of_blocks.samples; ++i) {
    sum += mean_part(i);
  }
  double time = sum * double(all_parts) / double(of_blocks.samples * ctas);
  double const longest = longest_part(of_blocks.tiles[0], of) + overhead;
  time = longest > time ? longest : time;
  for (int64_t k = 2; (k - 1) * ctas < all_parts; ++k) {
    double const bound =
        double(k) * mean_part(int32_t((k - 1) * ctas * of_blocks.samples / all_parts));
    time = bound > time ? bound : time;
  }
  return time + (divided ? kSumQueries / tile_m * double(all_parts) / double(ctas) : 0);
}

// What a fixed order costs besides, in steps: parts of shorter blocks wait for those of longer
// ones, for half as long as these have more steps than the average; pieces of a bundle wait as the
// bundle does. NVIDIA H100, 8192 tokens, causal, 24 heads of 128 over 2: two bundles take 2279 us,
// four 1994; one head and 16384 tokens: two pieces 576, four 739.
constexpr double waited_steps(BlockTiles const& of_blocks, StepParts const& of) {
  return (of_blocks.tiles[0] - of_blocks.mean()) * of.bundle / 2;
}

// Whether a kernel may write dQ itself, without sums in memory: all keys that a query sees are in
// one block, and each tile of queries is one of the block's steps. The gradient of sinks needs the
// kernel that finishes sums, and packed sequences have lengths that the host does not know.
constexpr bool has_one_adder(BackwardParams const& params, int32_t tile_m, int32_t tile_n) {
  if (params.cu_seqlens_q != nullptr || params.cu_seqlens_k != nullptr ||
      params.grad_sink != nullptr || params.seqlen_k < 1 || params.seqlen_k > tile_n) {
    return false;
  }
  MTiles const tiles = m_tiles(make_sequence(params.seqlen_q, params.seqlen_k, 0, 0,
                                             params.window_left, params.window_right),
                               0, tile_n, tile_m);
  return tiles.count() == ceil_div(params.seqlen_q, tile_m);
}

// Whether a call needs no sums of dQ in its workspace, of which no more is known than is when
// workspaces are allocated: not whether the gradient of its sinks will be wanted.
constexpr bool keeps_no_sums(BackwardParams const& params, int32_t tile_m, int32_t tile_n) {
  return params.sink == nullptr && has_one_adder(params, tile_m, tile_n);
}

// How many blocks of keys there are in all heads and sequences. The device alone knows the lengths
// of packed sequences. A KV head of theirs has at least as many blocks as one sequence of all rows
// would have, and a block for each sequence that is not empty. The larger of the two numbers is
// taken: there are at most twice as many blocks.
constexpr int64_t count_key_blocks(BackwardParams const& params, int32_t tile_n) {
  int64_t const blocks = tile_count(params.seqlen_k, tile_n, params.heads_kv, params.batch);
  int64_t const of_total = (params.total_k + tile_n - 1) / tile_n;
  int64_t const packed = params.heads_kv * (of_total > params.batch ? of_total : params.batch);
  return params.cu_seqlens_k != nullptr && packed < blocks ? packed : blocks;
}

// How the steps of every block of keys are divided into parts, in a launch of which `ctas` CTAs run
// at the same time, on a GPU with `l2_bytes` of L2: as the backward is estimated to take the least
// time, and not at all unless that saves a twentieth of it. It depends on nothing but sizes and the
// mask. It is right for packed sequences of all lengths, since each block divides the steps that it
// has.
//
// There are at most kRounds parts for each CTA that runs at the same time. This bounds the
// workspace: on a GPU with 132 SMs by 70 MB, and twice as much for packed sequences.
//
//   fixed_order  whether dQ is summed in a fixed order
constexpr StepParts divide_steps(BackwardParams const& params, int32_t tile_m, int32_t tile_n,
                                 int64_t ctas, int64_t l2_bytes, bool fixed_order) {
  constexpr int64_t kRounds = 4;
  constexpr int64_t kTried = 4;  // numbers of parts for each round
  constexpr int64_t kMostParts = 1024;
  constexpr int64_t kFewestSteps = 2;  // of the longest part
  // Pieces of a block begin at different tiles of queries in different blocks, if a mask lets these
  // have different numbers of them. Where L2 does not hold the queries and the sums of dQ of all
  // heads, they are loaded again and again: 28 heads of 128 over 4, 4096 tokens, causal, took 1.18
  // times as long with four pieces as with four bundles, and with two pieces no longer (H100).
  constexpr double kSpread = 1.1;
  int64_t const tiles = tile_count(params.seqlen_k, tile_n, params.heads_kv, params.batch);
  int64_t const blocks = count_key_blocks(params, tile_n);
  // Kernels count parts, and the CTAs that add them up or finish dQ, in 32 bits.
  bool const countable =
      tiles <= kMaxTiles / kMostParts &&
      tile_count(params.seqlen_q, tile_m, params.heads, params.batch) <= kMaxTiles / 2;
  StepParts best = whole_blocks(params);
  if (blocks == 0 || blocks >= 2 * ctas || !countable) {
    return best;
  }
  BlockTiles const of_blocks = sample_tiles(params, tile_m, tile_n);
  int32_t const group = best.group;
  int64_t const most_steps = int64_t(of_blocks.tiles[0]) * group / kFewestSteps;
  int64_t const most = most_steps < kMostParts ? most_steps : kMostParts;
  bool const spreads = of_blocks.differ() &&
                       int64_t(params.batch) * params.heads * query_head_bytes(params) > l2_bytes;
  // In a fixed order a piece may begin with a step that the block before has at the end of a piece.
  // It would wait for all of that one, which has steps of all heads of its bundle. So there bundles
  // have as few heads as there are parts for. In a simulation of 12 heads over 2, 2048 tokens,
  // causal, and 8 parts, the backward takes 38 steps, and 114 with pieces of all heads.
  bool const waits = fixed_order && of_blocks.differ();
  auto const estimate = [&](StepParts const& of) {
    double const time = estimate_steps(of_blocks, blocks, of, ctas, tile_m);
    return waits                                       ? time + waited_steps(of_blocks, of)
           : spreads && of.bundle > 1 && of.pieces > 2 ? time * kSpread
                                                       : time;
  };
  double least = estimate(best) * 19 / 20;
  int64_t before = 1;
  for (int64_t tried = 1; tried <= kRounds * kTried; ++tried) {
    int64_t const wanted = tried * ctas / (kTried * blocks);
    int64_t const parts = wanted < most ? wanted : most;
    if (parts <= before) {
      continue;
    }
    before = parts;
    for (bool of_heads : {true, false}) {
      StepParts of =
          of_heads ? parts_of_heads(group, int32_t(parts)) : parts_of_all(group, int32_t(parts));
      of = make_step_parts(group, of.bundle, pieces_with_steps(of_blocks.tiles[0], of));
      double const time = estimate(of);
      if (time < least && (of_heads || !waits)) {
        best = of;
        least = time;
      }
    }
  }
  return best;
}

// Divides the blocks of the last round alone, where all blocks have as many steps and there are too
// few of the last ones for all CTAs: 2048 blocks are 15 rounds of 132 CTAs and 68 blocks, for which
// 64 CTAs would wait. These blocks have the least number of parts of those that are estimated to
// take the least time. Nothing is divided where a head has one block: there may be no kernel after
// the backward then (has_one_adder()), which would have to be launched to add the parts up.
constexpr BlockDivision divide_last_round(BackwardParams const& params, int32_t tile_m,
                                          int32_t tile_n, int64_t ctas) {
  constexpr int64_t kRounds = 4, kFewestSteps = 2;  // as divide_steps() has them
  StepParts const whole = whole_blocks(params);
  BlockDivision best{whole, 0};
  int64_t const blocks = tile_count(params.seqlen_k, tile_n, params.heads_kv, params.batch);
  int64_t const last = blocks % ctas;
  bool const packed = params.cu_seqlens_q != nullptr || params.cu_seqlens_k != nullptr;
  if (packed || params.seqlen_k <= tile_n || last == 0 || blocks < 2 * ctas ||
      blocks > kMaxTiles / 2) {
    return best;
  }
  BlockTiles const of_blocks = sample_tiles(params, tile_m, tile_n);
  if (of_blocks.differ()) {
    return best;
  }
  int64_t const steps = int64_t(of_blocks.tiles[0]) * whole.group;
  double least = double(steps) + kBlockSteps;
  for (int64_t parts = 2; (parts * last - 1) / ctas < kRounds && steps / parts >= kFewestSteps;
       ++parts) {
    StepParts const of = parts_of_all(whole.group, int32_t(parts));
    double const rounds = double((parts * last - 1) / ctas + 1);
    double const time = rounds * (longest_part(of_blocks.tiles[0], of) + kBlockSteps + kPartSteps) +
                        kSumQueries / tile_m * double(parts * last) / double(ctas);
    if (time < least) {
      best = {of, int32_t(blocks - last)};
      least = time;
    }
  }
  return best;
}

// Which blocks of keys are divided into parts, and how.
//   persistent  whether the CTAs of a launch take blocks until there are no more
constexpr BlockDivision grad_division(BackwardParams const& params, int32_t tile_m, int32_t tile_n,
                                      int64_t ctas, int64_t l2_bytes, bool persistent,
                                      bool fixed_order) {
  StepParts const of_all = divide_steps(params, tile_m, tile_n, ctas, l2_bytes, fixed_order);
  return of_all.count > 1 || !persistent ? BlockDivision{of_all, 0}
                                         : divide_last_round(params, tile_m, tile_n, ctas);
}
// The same where the workspace is there: nothing is divided if it has no room for sums of parts.
constexpr BlockDivision grad_division(BackwardParams const& params, int32_t tile_m, int32_t tile_n,
                                      int64_t ctas, int64_t l2_bytes, bool persistent) {
  return params.grad_kv_parts == nullptr ? BlockDivision{whole_blocks(params), 0}
                                         : grad_division(params, tile_m, tile_n, ctas, l2_bytes,
                                                         persistent, params.grad_q_turn != nullptr);
}

// How many parts have sums of dK and dV in the workspace, at most, whether the order is fixed or
// not: for the function that says how large the workspace must be, which is not told.
constexpr int64_t most_part_blocks(BackwardParams const& params, int32_t tile_m, int32_t tile_n,
                                   int64_t ctas, int64_t l2_bytes, bool persistent) {
  int64_t most = 0;
  for (bool fixed_order : {false, true}) {
    BlockDivision const division =
        grad_division(params, tile_m, tile_n, ctas, l2_bytes, persistent, fixed_order);
    int64_t const blocks = grad_kv_blocks(params, tile_n).count() - division.whole;
    most = division.parts.count > 1 ? max_of(most, division.parts.count * blocks) : most;
  }
  return most;
}

}  // namespace cute_attention
