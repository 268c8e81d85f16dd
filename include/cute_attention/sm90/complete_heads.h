// sm90/complete_heads.h: which heads have sums of dQ that are complete before the backward kernel
// ends. Blocks of keys are computed one group of heads after the other (GradSchedule), so most
// heads do. A warp of each CTA writes their dQ while other heads are computed
// (sm90/grad_q_writer.h), and leaves little to the kernel after.
#pragma once

#include <cutlass/fast_math.h>

#include "cute_attention/core/address.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/kernel_library.h"

namespace cute_attention::sm90 {

// What the kernels know of them; the pointers are into the workspace.
struct CompleteHeads {
  // [batch, heads_kv]: how many blocks of keys have still to tell that they have added all that
  // they add to dQ of the KV head's query heads. Each warp that adds tells it. nullptr where none
  // does.
  int32_t* left = nullptr;
  // [blocks of the sums, parts]: whether dQ of a part has been written.
  int32_t* written = nullptr;
  // Divide by the parts of a KV head, the blocks of the sums of a query head, and the query heads
  // of a sequence. Divisions by numbers that the compiler does not know take a tenth of what the
  // warp has to do, in the time of the consumers that share its scheduler.
  cutlass::FastDivmod by_parts, by_blocks, by_heads;
};

// Whether heads are counted. The host does not know the lengths of packed sequences. With fewer
// than three blocks of keys for each SM most heads are complete only when the kernel ends. With few
// blocks of a head there is a part of dQ to write for every few steps: a backward with four takes
// 1.02 to 1.04 times as long at head dims 96 and 128, and 0.97 to 0.99 at 64; with eight 0.98 to
// 1.00, with 16 0.96 to 0.99 (H200).
template <class Traits>
constexpr bool counts_heads(BackwardParams const& params, DeviceInfo const& device) {
  int64_t const blocks = tile_count(params.seqlen_k, Traits::kTileN, params.heads_kv, params.batch);
  int64_t const tiles = tile_count(params.seqlen_q, Traits::kTileM, params.heads, params.batch);
  int32_t const least = Traits::kHeadDim > 64 ? 8 * Traits::kTileN + 1 : 1;  // keys
  return Traits::kCountsHeads && params.cu_seqlens_q == nullptr && params.cu_seqlens_k == nullptr &&
         params.seqlen_k >= least && tiles > 0 && tiles <= kMaxTiles / Traits::kConsumers &&
         blocks >= 3 * int64_t(device.multiprocessors);
}

// How many numbers that takes in the workspace.
template <class Traits>
int64_t count_head_numbers(BackwardParams const& params, DeviceInfo const& device) {
  return counts_heads<Traits>(params, device)
             ? int64_t(params.batch) * params.heads_kv +
                   grad_q_blocks(params, Traits::kTileM).count() * Traits::kConsumers
             : 0;
}

// For a call that counts heads; `numbers` is its place in the workspace.
template <class Traits>
CompleteHeads complete_heads(BackwardParams const& params, int32_t* numbers) {
  int32_t const blocks = ceil_div(params.seqlen_q, Traits::kTileM);
  CompleteHeads heads;
  heads.left = numbers;
  heads.written = numbers + int64_t(params.batch) * params.heads_kv;
  heads.by_parts =
      cutlass::FastDivmod(params.heads / params.heads_kv * blocks * Traits::kConsumers);
  heads.by_blocks = cutlass::FastDivmod(blocks);
  heads.by_heads = cutlass::FastDivmod(params.heads);
  return heads;
}

// The CTA of the kernel before that has the tile of queries `work` sets its numbers; `thread` is
// threadIdx.x.
template <class Traits>
CUTE_DEVICE void start_heads(BackwardParams const& params, CompleteHeads const& heads,
                             WorkTile const& work, int thread) {
  constexpr int kParts = Traits::kConsumers;
  if (heads.left == nullptr || thread >= kParts) {
    return;
  }
  int64_t const block =
      grad_q_blocks(params, Traits::kTileM).first(work.batch, work.head, 0) + work.m_block;
  heads.written[block * kParts + thread] = 0;
  int32_t const group = params.heads / params.heads_kv;
  if (thread == 0 && work.m_block == 0 && work.head % group == 0) {
    heads.left[work.batch * params.heads_kv + work.head / group] =
        kParts * ceil_div(params.seqlen_k, Traits::kTileN);
  }
}

}  // namespace cute_attention::sm90
