// params.h: what a launcher is given. Plain data; strides in elements; no torch, no CuTe.
#pragma once

#include <cstdint>

namespace cute_attention {

// Strides of a [batch, seqlen, heads, head_dim] tensor, in elements; head_dim has stride 1. A
// packed [total, heads, head_dim] tensor has batch = 0 and is offset by cu_seqlens. Strides are not
// negative; what is only read may have strides of 0.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t head;
};

// The longest sequence: positions below 2^30, those of a tile that reaches past the end included,
// are what kernels count in 32 bits (core/sequence.h).
constexpr int32_t kMaxTile = 256;
constexpr int32_t kMaxSeqlen = (1 << 30) - kMaxTile;

// The most rows of a packed tensor: cu_seqlens are 32 bits wide.
constexpr int64_t kMaxPackedRows = INT32_MAX - kMaxTile;

// The most tiles of a launch: a grid has 2^31 - 1 CTAs at most, and a persistent one counts a round
// past its last tile.
constexpr int64_t kMaxTiles = INT32_MAX - 65535;

// Tiles of `tile` rows that all heads of all sequences take; where they are too many for 64 bits, a
// number above kMaxTiles.
constexpr int64_t tile_count(int32_t seqlen, int32_t tile, int32_t heads, int32_t batch) {
  int64_t const blocks = (int64_t(seqlen) + tile - 1) / tile;
  int64_t const all_heads = int64_t(heads) * batch;
  if (blocks <= 0 || all_heads <= 0) {
    return 0;
  }
  return all_heads > kMaxTiles ? all_heads : all_heads * blocks;
}

// An unbounded side of the window: larger than any distance between two positions.
constexpr int32_t kUnbounded = INT32_MAX;

struct ForwardParams {
  void const* q;  // [batch, seqlen_q, heads, head_dim], or packed [total_q, heads, head_dim]
  void const* k;  // [batch, seqlen_k, heads_kv, head_dim], or packed [total_k, heads_kv, head_dim]
  void const*
      v;  // [batch, seqlen_k, heads_kv, head_dim_v], or packed [total_k, heads_kv, head_dim_v]
  // Every row is written; packed rows after the last sequence as a query that sees no key.
  void* o;     // [batch, seqlen_q, heads, head_dim_v], or packed [total_q, heads, head_dim_v]
  float* lse;  // [batch, heads, seqlen_q], or packed [heads, total_q], contiguous; may be null

  // int32 [batch + 1] on the device, or both null where every sequence is seqlen_q (seqlen_k) long.
  int32_t const* cu_seqlens_q;
  int32_t const* cu_seqlens_k;

  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides o_stride;

  int32_t batch;
  // At most kMaxSeqlen; where packed, at least the longest sequence: else each row of the sequences
  // that are longer is right or NaN.
  int32_t seqlen_q;
  int32_t seqlen_k;  // likewise
  int64_t total_q;   // rows of packed q, at most kMaxPackedRows; unused otherwise
  int64_t total_k;   // rows of packed k and v, likewise
  int32_t heads;
  int32_t heads_kv;  // divides heads; query head h reads kv head h / (heads / heads_kv)
  int32_t head_dim;  // at most the row's, a multiple of 8
  int32_t head_dim_v;

  float scale;    // multiplies q.k; finite
  float softcap;  // s -> softcap * tanh(s / softcap) after the scale; 0 where there is none

  // Query i sees keys j with i + shift - window_left <= j <= i + shift + window_right, where
  // shift = seqlen_k - seqlen_q of its sequence. Causal is window_right = 0. Never negative.
  int32_t window_left;
  int32_t window_right;

  // int32 [1], a workspace: the tile of packed queries that the next free CTA takes. Null deals
  // them out evenly. Its contents before the call do not matter.
  int32_t* next_tile;
};

// To the backward a query whose LSE * log2(e) is lower sees no key: its gradients are 0, and it
// gives none to keys. All its scores are below about -1e7, where floats are too far apart for
// P = exp(S - LSE): keys that something in q and k, such as a channel of -1e30, is meant to hide.
constexpr float kLowestLseLog2 = -16777216.f;  // -2^24

// As ForwardParams; what both name means the same in both.
struct BackwardParams {
  void const* q;
  void const* k;
  void const* v;
  void const* o;
  void const* grad_o;     // like o
  float const* lse;       // [batch, heads, seqlen_q], or packed [heads, total_q], contiguous
  float const* grad_lse;  // like lse; null where the LSE has no gradient
  void* grad_q;           // like q
  void* grad_k;           // like k
  void* grad_v;           // like v

  // Workspaces; their contents before the call do not matter.
  float* delta;          // twice lse: grad_lse - rowsum(grad_o * o), then LSE * log2(e)
  float* grad_q_sum;     // [grad_q_blocks(params, tile_m), tile_m, the row's head_dim]
  int32_t* grad_q_turn;  // [grad_q_blocks(params, tile_m)]; not null asks for bitwise determinism

  int32_t const* cu_seqlens_q;
  int32_t const* cu_seqlens_k;

  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides o_stride;
  Strides grad_o_stride;
  Strides grad_q_stride;
  Strides grad_k_stride;
  Strides grad_v_stride;

  int32_t batch;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int64_t total_q;
  int64_t total_k;
  int32_t heads;
  int32_t heads_kv;
  int32_t head_dim;
  int32_t head_dim_v;

  float scale;
  float softcap;
  int32_t window_left;
  int32_t window_right;
};

// Blocks of tile_m queries of all heads. Packed sequences begin at a block of their own: sequence b
// of a head begins at block (cu_seqlens_q[b] + b * tile_m) / tile_m.
constexpr int64_t grad_q_blocks(BackwardParams const& params, int32_t tile_m) {
  int64_t const blocks_of_a_head =
      params.cu_seqlens_q == nullptr
          ? int64_t(params.batch) * ((params.seqlen_q + tile_m - 1) / tile_m)
          : (params.total_q + int64_t(params.batch) * tile_m) / tile_m;
  return blocks_of_a_head * params.heads;
}

}  // namespace cute_attention
