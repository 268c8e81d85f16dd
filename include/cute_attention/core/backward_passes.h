// core/backward_passes.h: what the kernels before and after the backward kernel have in common on
// all architectures. Each of their CTAs has one tile of queries of one head.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/sink.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention {

// The params of the kernels before and after the backward kernel. Of packed sequences few may be as
// long as params.seqlen_q says, and a CTA for each tile of that length would find nothing to do in
// most of them. Then seqlen_q, for which they have CTAs, is less, and a CTA takes several tiles of
// a long sequence (finish_backward()): there are at most kMostCtas times as many as tiles.
constexpr BackwardParams params_of_passes(BackwardParams const& params, int32_t tile_m) {
  constexpr int64_t kMostCtas = 4;
  if (params.cu_seqlens_q == nullptr || params.batch == 0) {
    return params;
  }
  BackwardParams passes = params;
  int64_t const tiles = params.total_q / tile_m + params.batch;  // at most
  int64_t const rows = kMostCtas * tiles / params.batch * tile_m;
  if (rows < params.seqlen_q) {
    passes.seqlen_q = int32_t(rows);
  }
  return passes;
}

// The tile of queries that this CTA of backward_prepare or backward_finish takes. The last CTA
// takes the first tile: any CTAs before those of the tiles do something else. These kernels go from
// the last head to the first, and `backward` goes from the first to the last: so each kernel begins
// with what the kernel before it wrote last, and finds it in L2.
CUTE_DEVICE WorkTile last_first(BackwardParams const& params, int tile_m) {
  return work_tile(params, tile_m, int(gridDim.x - 1 - blockIdx.x));
}

// What a CTA of backward_finish does: finish_queries(sequence, m_block) writes dQ of a tile of
// queries. A packed sequence may be longer than params.seqlen_q, for which the grid was made with
// m_blocks CTAs for each head. Then each CTA also finishes every m_blocks-th tile after its own, so
// that no tile is left out.
//
//   kPadded  whether the numbers of queries are padded (core/grad_tile.h)
//   partial  (kThreads / 32)  room in shared memory
template <int kTileM, int kThreads, bool kPadded, class FinishQueries>
CUTE_DEVICE void finish_backward(BackwardParams const& params, WorkTile const& work, float* partial,
                                 FinishQueries const& finish_queries) {
  if (writes_sink_gradient(params, work)) {
    write_sink_gradient<kThreads, kPadded>(params, work.head, partial);
  }
  Sequence const sequence = load_sequence(params, work.batch);
  int const m_blocks = ceil_div(params.seqlen_q, kTileM);
  for (int m_block = work.m_block; m_block * kTileM < sequence.seqlen_q; m_block += m_blocks) {
    finish_queries(sequence, m_block);
  }
}

}  // namespace cute_attention
