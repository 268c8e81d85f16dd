// core/grad_parts.h: the backward pass where there are few blocks of keys. A CTA computes dK and dV
// of a block of keys in one step for each tile of queries of each query head of the group. If there
// are fewer blocks than CTAs that can run, the steps of each block are divided into parts. Each
// part is computed by another CTA, which writes its own sums of dK and dV to the workspace; the
// kernel after the backward adds them up (core/part_sums.h).
#pragma once

#include <cute/config.hpp>
#include <initializer_list>

#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/m_tiles.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention {

// The steps of one part: which query heads it goes through, which step is the first one, and how
// many there are. Their order is that of core/backward_steps.h.
struct StepRange {
  int32_t head_begin;  // each tile of queries is taken of the query heads [head_begin, head_end)
  int32_t head_end;
  int32_t m_step;   // from a tile to the next: -1, or 1 where the steps go up
  int32_t head;     // query head of the first step
  int32_t m_block;  // tile of queries of the first step
  int32_t count;    // may be 0: then the others mean nothing
};

// How the steps of each block of keys are divided into parts: the query heads of the group into
// bundles, and the steps of a bundle into pieces. Each piece is a part.
struct StepParts {
  int32_t group;   // query heads of a KV head
  int32_t bundle;  // query heads of a bundle; the last one may have fewer
  int32_t pieces;  // of a bundle, at most
};

// For `parts` parts or a few less. Bundles of whole heads, where that makes the longest at most a
// sixteenth longer; else pieces of all heads together.
CUTE_HOST_DEVICE constexpr StepParts step_parts(int32_t group, int32_t parts) {
  int32_t const bundle = ceil_div(group, parts);
  return 16 * int64_t(bundle) * parts <= 17 * int64_t(group) ? StepParts{group, bundle, 1}
                                                             : StepParts{group, group, parts};
}

// The same for a call. Under a mask the blocks of a sequence need different tiles of queries. So a
// piece may begin with a step that the block before has at the end of a piece. Where dQ is summed
// in a fixed order it would wait for all of that one, which has steps of all heads of its bundle.
// So there bundles have as few heads as there are parts for. In a simulation of 12 heads over 2,
// 2048 tokens, causal, and 8 parts, the backward takes 38 steps, and 114 with pieces of all heads.
CUTE_HOST_DEVICE constexpr StepParts step_parts(BackwardParams const& params, int32_t tile_n,
                                                int32_t parts) {
  int32_t const group = params.heads / params.heads_kv;
  bool const has_mask = params.window_left != kUnbounded || params.window_right != kUnbounded;
  if (params.grad_q_turn != nullptr && has_mask && params.seqlen_k > tile_n) {
    return {group, ceil_div(group, parts), max_of(parts / group, 1)};
  }
  return step_parts(group, parts);
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
//   up  whether they go from the first tile to the last; the same for all parts of a block
CUTE_HOST_DEVICE constexpr StepRange steps_of_part(MTiles const& tiles, GradTile const& tile,
                                                   StepParts const& of, bool up = false) {
  int32_t const pieces = pieces_with_steps(tiles.count(), of);
  int32_t const first = pieces == 0 ? of.group : tile.part / pieces * of.bundle;
  if (first >= of.group) {
    return {0, 0, -1, 0, 0, 0};
  }
  int32_t const heads = min_of(of.bundle, of.group - first);
  int32_t const longest = longest_part(tiles.count(), of);
  int32_t const begin = tile.part % pieces * longest;
  int32_t const head = tile.head_kv * of.group + first;
  int32_t const m_step = up ? 1 : -1;
  int32_t const m_first = up ? tiles.begin : tiles.end - 1;
  return {head,
          head + heads,
          m_step,
          head + begin % heads,
          m_first + m_step * (begin / heads),
          min_of(longest, heads * tiles.count() - begin)};
}

// The numbers of steps of blocks of keys that stand for all blocks, in descending order, in a dense
// call, or in a packed one whose sequences all have the greatest length. Under a mask the blocks
// differ, but slowly from one to the next.
struct BlockSteps {
  static constexpr int32_t kSamples = 16;
  int32_t samples = 0;
  int64_t steps[kSamples] = {};

  constexpr void insert(int64_t value) {
    int32_t place = samples++;
    for (; place > 0 && steps[place - 1] < value; --place) {
      steps[place] = steps[place - 1];
    }
    steps[place] = value;
  }
};
constexpr BlockSteps sample_steps(BackwardParams const& params, int32_t tile_m, int32_t tile_n) {
  Sequence const sequence = make_sequence(params.seqlen_q, params.seqlen_k, 0, 0,
                                          params.window_left, params.window_right);
  int64_t const group = params.heads / params.heads_kv;
  int32_t const n_blocks = ceil_div(params.seqlen_k, tile_n);
  int32_t const samples = min_of(n_blocks, BlockSteps::kSamples);
  BlockSteps found;
  for (int32_t i = 0; i < samples; ++i) {
    int32_t const n_block = int32_t(int64_t(2 * i + 1) * n_blocks / (2 * samples));
    found.insert(m_tiles(sequence, n_block * tile_n, tile_n, tile_m).count() * group);
  }
  return found;
}

// Estimates how long the backward takes, in steps, where each of `blocks` blocks of keys is divided
// into `parts` parts, and `ctas` CTAs run at the same time. A part takes `overhead` steps more than
// it has. The longest parts come first, and a CTA takes the next part when it is free. Then the
// backward takes about as long as the largest of these lower bounds: the average time of a CTA;
// and, for each k, k times the part of number (k - 1) * ctas + 1, counted from the longest, since
// some CTA has k of the parts up to it. Where parts differ, CTAs do not end at the same time: half
// of what the longest part has more than the average is added. Measured on an H200, causal: with
// 71 heads of 64 over one KV head, batch 4, 2048 tokens, 8 parts take 931 us and 4 parts 1237 us;
// at head dim 128, 64 heads over 8, 2048 tokens, 4 parts take 464 us and 2 parts 535 us.
constexpr int64_t estimate_steps(BlockSteps const& of_blocks, int64_t blocks, int64_t parts,
                                 int64_t ctas, int64_t overhead) {
  auto const time_of_part = [&](int32_t sample) {
    int64_t const steps = of_blocks.steps[sample];
    return steps == 0 ? 0 : (steps + parts - 1) / parts + overhead;
  };
  int64_t const all_parts = blocks * parts;
  int64_t sum = 0, longest = 0;
  for (int32_t i = 0; i < of_blocks.samples; ++i) {
    sum += time_of_part(i);
  }
  for (int64_t k = 1; (k - 1) * ctas < all_parts; ++k) {
    int64_t const time = k * time_of_part(int32_t((k - 1) * ctas * of_blocks.samples / all_parts));
    longest = time > longest ? time : longest;
  }
  int64_t const average = sum * all_parts / (of_blocks.samples * ctas);
  int64_t const unevenness = (time_of_part(0) - sum / of_blocks.samples) / 2;
  return (longest > average ? longest : average) + unevenness;
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

// The number of parts into which the steps of every block of keys are divided, in a launch of which
// `ctas` CTAs run at the same time: the number with which the backward is estimated to take the
// least time, and 1 unless another one saves a tenth of it. It depends on nothing but sizes and the
// mask, so that the function that says how large the workspace must be, and the launch, find the
// same number. It is right for packed sequences of all lengths, since each block divides the steps
// that it has.
//
// There are at most kRounds parts for each CTA that runs at the same time. This bounds the
// workspace: on a GPU with 132 SMs by 70 MB, and twice as much for packed sequences.
constexpr int32_t grad_parts(BackwardParams const& params, int32_t tile_m, int32_t tile_n,
                             int64_t ctas) {
  constexpr int64_t kRounds = 4;
  constexpr int64_t kMostParts = 1024;
  constexpr int64_t kFewestSteps = 2;  // of the longest part
  // What a part takes beside its steps: to load K, V and the first queries, and to add the last dQ;
  // to write its sums of dK and dV; to add them up later.
  constexpr int64_t kBlockSteps = 2;
  constexpr int64_t kPartSteps = 2;
  constexpr int64_t kSumSteps = 1;
  int64_t const tiles = tile_count(params.seqlen_k, tile_n, params.heads_kv, params.batch);
  int64_t const blocks = count_key_blocks(params, tile_n);
  // Kernels count parts, and the CTAs that add them up or finish dQ, in 32 bits.
  bool const countable =
      tiles <= kMaxTiles / kMostParts &&
      tile_count(params.seqlen_q, tile_m, params.heads, params.batch) <= kMaxTiles / 2;
  if (blocks == 0 || blocks >= 2 * ctas || !countable) {
    return 1;
  }
  BlockSteps const steps = sample_steps(params, tile_m, tile_n);
  int32_t const group = params.heads / params.heads_kv;
  int64_t best = 1, least = estimate_steps(steps, blocks, 1, ctas, kBlockSteps) * 9 / 10;
  for (int64_t round = 1; round <= kRounds; ++round) {
    int64_t parts = round * ctas / blocks;
    for (int64_t const bound : {steps.steps[0] / kFewestSteps, kMostParts}) {
      parts = parts < bound ? parts : bound;
    }
    if (parts > 1) {
      parts = parts_with_steps(int32_t(steps.steps[0] / group), step_parts(group, int32_t(parts)));
      int64_t const time = estimate_steps(steps, blocks, parts, ctas, kBlockSteps + kPartSteps) +
                           kSumSteps * (1 + blocks * parts / ctas);
      if (time < least) {
        best = parts;
        least = time;
      }
    }
  }
  return int32_t(best);
}

}  // namespace cute_attention
