// append_params.h: the arguments of the kernel that appends to a cache. Plain data, like params.h.
#pragma once

#include <cstdint>

#include "cute_attention/params.h"

namespace cute_attention {

// Rotary embeddings: pairs (a, b) of the first rotary_dim numbers of a head become
// (a c - b s, a s + b c), in fp32, with row `angle` of cos and sin. Where angles are past the last
// row they take that, and below 0 the first.
struct RotaryOptions {
  void const* cos;  // [positions, rotary_dim / 2]; null: nothing is turned
  void const* sin;
  int64_t cos_stride;  // of a row, in elements
  int64_t sin_stride;
  int32_t positions;
  int32_t rotary_dim;        // even, at most head_dim
  int32_t is_interleaved;    // pairs are neighbours; else number i and number i + rotary_dim / 2
  int32_t is_float;          // cos and sin are fp32; else of the dtype of q
  int32_t const* seqlens;    // [batch]: the angle of the first new key; null: cache.seqused_k
  int32_t turns_each_query;  // query i has the angle of new key i; else of the first one
};

// New keys and values are written to a cache: key i of sequence b becomes token seqused_k[b] + i.
// What the cache has no room or no page for is not written. Keys are turned first, and queries too,
// those into another tensor. head_dim and head_dim_v are multiples of 8, as are all strides.
struct AppendParams {
  void const* k;   // [batch, seqlen_new, heads_kv, head_dim], or packed [total_new, ...]
  void const* v;   // likewise, of head_dim_v columns
  void* k_cache;   // [pages, page_size, heads_kv, head_dim]
  void* v_cache;   // likewise; it may be part of k_cache where both get the same numbers
  void const* q;   // [batch, seqlen_q, heads, head_dim], or packed [total_q, ...]
  void* turned_q;  // likewise; read and written only where cos is not null

  Strides k_stride;
  Strides v_stride;
  Strides k_cache_stride;
  Strides v_cache_stride;
  Strides q_stride;
  Strides turned_q_stride;

  int32_t const* cu_seqlens_new;  // [batch + 1]; null: each sequence has seqlen_new new keys
  int32_t const* cu_seqlens_q;    // likewise
  int32_t batch;
  int32_t seqlen_new;
  int32_t seqlen_q;
  int64_t total_new;
  int64_t total_q;
  int32_t heads;
  int32_t heads_kv;
  int32_t head_dim;
  int32_t head_dim_v;

  KeyCache cache;  // seqused_k: the tokens before the call; leftpad_k is not read
  int32_t* used;   // [batch], written: the tokens after it
  RotaryOptions rotary;
};

}  // namespace cute_attention
