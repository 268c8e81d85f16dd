// core/grad_tile.h: which block of keys a CTA of the backward pass computes, and where in the
// workspaces the sums of dQ lie, to which it adds, and the sums of dK and dV of a part.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/address.h"
#include "cute_attention/core/block_tiles.h"
#include "cute_attention/core/kv_tiles.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/params.h"

namespace cute_attention {

struct GradTile {
  int32_t n_block;
  int32_t head_kv;
  int32_t batch;
  int32_t part;  // which part of the block's steps (core/grad_parts.h)
};

// How the steps of each block of keys are divided into parts (core/grad_parts.h): the query heads
// of the group into bundles, and the steps of a bundle into pieces. Each piece is a part.
struct StepParts {
  int32_t group;   // query heads of a KV head
  int32_t bundle;  // query heads of a bundle; the last one may have fewer
  int32_t pieces;  // of a bundle, at most
  int32_t count;   // parts of a block, at most; 1 where nothing is divided
};
CUTE_HOST_DEVICE constexpr StepParts make_step_parts(int32_t group, int32_t bundle,
                                                     int32_t pieces) {
  return {group, bundle, pieces, bundle < 1 ? 1 : ceil_div(group, bundle) * pieces};
}

// In which order a block of keys takes its steps (core/backward_steps.h), the same for all of its
// parts.
enum class StepOrder : int32_t {
  Down,           // each tile of queries of all heads, from the last tile to the first
  Up,             // the same from the first tile to the last
  HeadAfterHead,  // all tiles of a head, from the last to the first, and then of the next head
};

// Which blocks of keys are divided into parts, of all in the order of GradSchedule.
struct BlockDivision {
  StepParts parts;    // of a block that is divided
  int32_t whole = 0;  // how many blocks, the first ones, are not; 0 where parts.count is 1
};

// The order in which CTAs take the blocks of keys of all heads and sequences.
//
// The KV heads are divided into groups, one group after the other. L2 can hold the queries and
// the sums of dQ of about one group, of each KV head those of one query head. With more query heads
// CTAs still find them there where they began together, since they take the same tile of queries at
// the same time (core/backward_steps.h). Within a group the blocks of the first keys come first.
// Under a causal mask most queries see these keys, so these blocks take the longest, and the short
// blocks are left for the end, where they keep all SMs busy.
//
// If dQ is to be summed in a fixed order, the CTAs of a head add to it in the order of their
// n_block. A CTA then waits only for CTAs with a lower n_block, which have started before it. This
// also holds where the steps of a block are divided into parts: all parts of a block come before
// the parts of the next block of the head.
struct GradSchedule {
  int32_t n_blocks;
  int32_t heads_kv;         // KV heads of one sequence
  int32_t all_heads;        // KV heads of all sequences together
  int32_t heads_per_group;  // KV heads of one group
  StepParts parts;          // of a block of keys that is divided
  int32_t whole;            // how many blocks come before those that are
  int32_t ctas;             // of a round that goes up or down; 0 where all go down
  bool by_heads;            // whether a block takes one query head after the other

  // How many blocks are divided, if parts.count is not 1.
  CUTE_HOST_DEVICE constexpr int64_t divided() const {
    return int64_t(n_blocks) * all_heads - whole;
  }
  // How many parts all blocks of keys have; a block that is not divided is one. A launch may have
  // at most kMaxTiles.
  CUTE_HOST_DEVICE constexpr int64_t tiles() const { return whole + divided() * parts.count; }

  // How the block of part `index` is divided.
  CUTE_HOST_DEVICE constexpr StepParts parts_of(int32_t index) const {
    return index < whole ? make_step_parts(parts.group, parts.group, 1) : parts;
  }

  // In which order part `index` takes its steps. That of all parts of a block is the same, since
  // they are pieces of one order.
  //
  // CTAs of the first round begin together, and go down together: each tile of queries is in L2 for
  // all of them. Those of the second begin when a block of the first ends, under a causal mask the
  // shorter ones later, and end together. So they go up.
  CUTE_HOST_DEVICE constexpr StepOrder order(int32_t index) const {
    if (by_heads) {
      return StepOrder::HeadAfterHead;
    }
    bool const up = ctas > 0 && (index - part_of(index)) / ctas % 2 == 1;
    return up ? StepOrder::Up : StepOrder::Down;
  }

  CUTE_HOST_DEVICE constexpr GradTile tile(int32_t index) const {
    int32_t const divided = index - whole;
    GradTile tile = block(divided < 0 ? index : whole + divided / parts.count);
    tile.part = part_of(index);
    return tile;
  }

  // Block `number` of all, and the number of a block.
  CUTE_HOST_DEVICE constexpr GradTile block(int32_t number) const {
    int32_t const per_group = n_blocks * heads_per_group;
    int32_t const first_head = number / per_group * heads_per_group;
    int32_t const heads_here = min_of(heads_per_group, all_heads - first_head);
    int32_t const in_group = number % per_group;
    int32_t const head = first_head + in_group % heads_here;
    return {in_group / heads_here, head % heads_kv, head / heads_kv, 0};
  }
  CUTE_HOST_DEVICE constexpr int32_t number(GradTile const& tile) const {
    int32_t const head = tile.batch * heads_kv + tile.head_kv;
    int32_t const first_head = head / heads_per_group * heads_per_group;
    int32_t const heads_here = min_of(heads_per_group, all_heads - first_head);
    return first_head * n_blocks + tile.n_block * heads_here + head - first_head;
  }

  // Whether the block of a part is divided.
  CUTE_HOST_DEVICE constexpr bool is_divided(GradTile const& tile) const {
    return parts.count > 1 && (whole == 0 || number(tile) >= whole);
  }

 private:
  CUTE_HOST_DEVICE constexpr int32_t part_of(int32_t index) const {
    return index < whole ? 0 : (index - whole) % parts.count;
  }
};

// What L2 holds of a query head: Q and dO in 16 bits, and the sums of dQ in 32.
constexpr int64_t query_head_bytes(BackwardParams const& params) {
  return int64_t(params.seqlen_q) * (6 * params.head_dim + 2 * params.head_dim_v);
}

// How many of `all_heads` KV heads a group has: at least `wanted`, and so that the last group has
// work for all CTAs until its longest blocks end. Their steps have no other CTAs to share them. If
// 64 heads of 4096 tokens are divided into nine groups of seven, the one that is left has the last
// tenth of a causal backward to itself, with 32 blocks for 132 CTAs.
//
//   n_blocks   blocks of keys of a head
//   ctas       how many CTAs run at the same time
constexpr int64_t heads_of_group(BlockTiles const& of_blocks, int64_t n_blocks, int64_t all_heads,
                                 int64_t wanted, int64_t ctas) {
  // CTAs may wait for a fiftieth of the backward. With a hundredth, 32 x 512 tokens and 16 heads of
  // 128 had groups of 57 heads instead of 52, and took 1.05 times as long by medians, 1.015 by the
  // least times (H100).
  constexpr double kWaits = 0.02;
  double const of_head = of_blocks.mean() * double(n_blocks);
  double const needed =
      of_head == 0 ? 0 : of_blocks.tiles[0] * double(ctas) / of_head - kWaits * double(all_heads);
  int64_t best = wanted, most = 0;
  for (int64_t heads = wanted; heads <= 2 * wanted && heads <= all_heads; ++heads) {
    int64_t const last = all_heads % heads == 0 ? heads : all_heads % heads;
    if (last > most) {
      best = heads;
      most = last;
    }
    if (double(last) >= needed) {
      break;
    }
  }
  return best;
}

// `l2_bytes` says how much of the L2 cache a group may take, `ctas` how many CTAs run at the same
// time, `division` which blocks are divided, and how (grad_division()).
//
// If dQ is summed in a fixed order, the CTAs of a head follow each other, each one step of the loop
// over queries behind the one before. Then few CTAs of a head should run at the same time: four,
// and one more for every 16 steps. For this a group may need more heads than L2 holds. But it
// should not have more than it needs. Measured on an H200 at head dim 256 and 512 tokens, where a
// head takes 1 MB: with 133 heads in a group the backward in a fixed order takes 1.44 times as long
// as the one in any order, with 33 heads 1.09 times.
constexpr GradSchedule make_grad_schedule(BackwardParams const& params, int32_t tile_m,
                                          int32_t tile_n, int64_t l2_bytes, int64_t ctas,
                                          BlockDivision const& division) {
  // Of a KV head the bytes of one query head count. With those of all query heads groups are
  // smaller, and the longest blocks of the last one begin when other CTAs have nothing left to
  // take: a causal backward of 8192 tokens took 1.32 times as long with 64 heads of 128 over
  // 4, 1.16 with 32 over 8 (H200).
  int64_t const head_bytes = query_head_bytes(params);
  int64_t const all_heads = int64_t(params.batch) * params.heads_kv;
  int64_t const fitting = l2_bytes / (head_bytes > 0 ? head_bytes : 1);
  // A part of a block follows those of the blocks before that have the same steps, so there are as
  // many rows of CTAs that follow each other as there are parts.
  int32_t const rows = division.whole > 0 ? 1 : division.parts.count;
  int64_t const steps =
      int64_t(ceil_div(params.seqlen_q, tile_m)) * ceil_div(params.heads / params.heads_kv, rows);
  int64_t const least = params.grad_q_turn == nullptr ? 1 : ctas / rows / (4 + steps / 16) + 1;
  int64_t const wanted = fitting > least ? fitting : least;
  // With less than two blocks for each CTA there is one group: divide_steps() chooses the number of
  // parts for blocks that come with the longest of all heads first.
  int32_t const n_blocks = ceil_div(params.seqlen_k, tile_n);
  bool const divides = all_heads > wanted && n_blocks * all_heads >= 2 * ctas;
  int64_t const of_group = divides ? heads_of_group(sample_tiles(params, tile_m, tile_n), n_blocks,
                                                    all_heads, wanted, ctas)
                                   : all_heads;
  // With a window that hides half of the keys or more, blocks take one head after the other
  // (core/backward_steps.h). In a fixed order not where they are divided into parts: these would
  // wait for each other in each head anew.
  bool const by_heads =
      params.window_left <= params.seqlen_k / 2 && (params.grad_q_turn == nullptr || rows == 1);
  // In a fixed order a block that goes up might wait for one that goes down until that ends. The
  // tiles of one or two heads stay in L2 in either direction: with one it gained nothing on an
  // H100, and 16 heads over 8 took 1.05 times as long.
  // Where no mask lets blocks end at different times, going up took 0.96 to 1.10 times as long.
  bool const turns = !by_heads && params.grad_q_turn == nullptr &&
                     params.heads > 2 * params.heads_kv && params.window_right == 0;
  return {n_blocks,       params.heads_kv, int32_t(all_heads),        int32_t(of_group),
          division.parts, division.whole,  turns ? int32_t(ctas) : 0, by_heads};
}

// Where in a workspace the blocks of the tiles of q, or of k, lie. Each tile of each head of each
// sequence has a block. Each packed sequence begins with a new block: in the blocks of a head,
// sequence b begins at block (cu_seqlens[b] + b * tile) / tile.
struct TileBlocks {
  bool packed;
  int32_t batch;
  int32_t heads;
  int32_t seqlen;
  int64_t total;  // rows of a packed tensor
  int32_t tile;   // rows of a tile

  CUTE_HOST_DEVICE constexpr int64_t count() const { return of_a_head() * heads; }
  // The number of the block that belongs to the first tile of a head of a sequence, which begins at
  // row `row` of a packed tensor. The blocks of its other tiles follow.
  CUTE_HOST_DEVICE constexpr int64_t first(int32_t sequence, int32_t head, int64_t row) const {
    if (!packed) {
      return (int64_t(sequence) * heads + head) * ceil_div(seqlen, tile);
    }
    return head * of_a_head() + (row + int64_t(sequence) * tile) / tile;
  }

 private:
  CUTE_HOST_DEVICE constexpr int64_t of_a_head() const {
    return packed ? (total + int64_t(batch) * tile) / tile
                  : int64_t(batch) * ((seqlen + tile - 1) / tile);
  }
};

// The blocks of the sums of dQ, of tile_m x head_dim floats.
CUTE_HOST_DEVICE constexpr TileBlocks grad_q_blocks(BackwardParams const& params, int32_t tile_m) {
  return {params.cu_seqlens_q != nullptr,
          params.batch,
          params.heads,
          params.seqlen_q,
          params.total_q,
          tile_m};
}
CUTE_HOST_DEVICE constexpr int64_t first_grad_q_block(BackwardParams const& params,
                                                      Sequence const& sequence, int32_t batch,
                                                      int32_t head, int32_t tile_m) {
  return grad_q_blocks(params, tile_m).first(batch, head, sequence.row_q);
}

// Where delta and the LSE * log2(e) of queries lie in the workspace: as the LSE of the call does,
// or padded. Then those of a head of a sequence begin at a multiple of kNumberRows, so that a bulk
// copy, which needs multiples of 16 bytes, can load a tile's, and behind the last query of a tile
// follow numbers of queries that see no key (backward_prepare.h). The kernels of sm90 have them
// padded. In those of sm80 a padded place would take registers that head dim 128 does not have.
constexpr int32_t kNumberRows = 128;
CUTE_HOST_DEVICE constexpr TileBlocks number_blocks(BackwardParams const& params) {
  return grad_q_blocks(params, kNumberRows);
}
template <bool kPadded>
CUTE_HOST_DEVICE constexpr int64_t numbers_size(BackwardParams const& params) {
  return kPadded ? number_blocks(params).count() * kNumberRows : lse_size(params);
}
template <bool kPadded>
CUTE_HOST_DEVICE constexpr int64_t number_index(BackwardParams const& params,
                                                Sequence const& sequence, int32_t batch,
                                                int32_t head, int64_t query) {
  if constexpr (kPadded) {
    return number_blocks(params).first(batch, head, sequence.row_q) * kNumberRows + query;
  } else {
    return lse_index(params, sequence, batch, head, query);
  }
}

// The blocks of the sums of dK and dV of one part, of tile_n x (head_dim + head_dim_v) floats.
CUTE_HOST_DEVICE constexpr TileBlocks grad_kv_blocks(BackwardParams const& params, int32_t tile_n) {
  return {params.cu_seqlens_k != nullptr,
          params.batch,
          params.heads_kv,
          params.seqlen_k,
          params.total_k,
          tile_n};
}

// The tiles of a backward row.
struct GradShape {
  int32_t tile_m;
  int32_t tile_n;
  int32_t head_dim;
  int32_t head_dim_v;
};

// The workspaces of a backward pass that computes `delta` for each query, adds up dQ in blocks, and
// has sums of dK and dV of `part_blocks` parts (most_part_blocks()):
//
//   delta          [2, numbers_size]           [0]: grad_lse - rowsum(grad_o * o);
//                                              [1]: LSE * log2(e)
//   grad_q_sum     [blocks, tile_m, head_dim]  the sums of dQ
//   grad_q_turn    [blocks]                    which CTA adds next, if the order is fixed
//   grad_kv_parts  [part_blocks, tile_n, head_dim + head_dim_v]
//                                              dK, not scaled, and dV of each part
//
//   kPadded  whether the numbers of queries are padded
template <bool kPadded>
constexpr BackwardWorkspace grad_workspace(BackwardParams const& params, GradShape const& shape,
                                           int64_t part_blocks) {
  int64_t const blocks = grad_q_blocks(params, shape.tile_m).count();
  int64_t const block_kv = int64_t(shape.tile_n) * (shape.head_dim + shape.head_dim_v);
  return {2 * numbers_size<kPadded>(params), blocks * shape.tile_m * shape.head_dim, blocks,
          part_blocks * block_kv, 0};
}

}  // namespace cute_attention
