// params.h: the arguments of a launch. Plain data; strides in elements; no torch, no CuTe.
#pragma once

#include <cstdint>

namespace cute_attention {

// Strides of a [batch, seqlen, heads, head_dim] tensor, in elements. The stride of head_dim is 1. A
// packed tensor [total, heads, head_dim] has batch = 0: cu_seqlens say where its sequences begin.
// Strides are not negative. Those of a tensor that is only read may be 0.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t head;
};

// The most rows or columns of a tile, and the longest sequence. Kernels count positions in 32 bits
// (core/sequence.h), which holds as long as positions are below 2^30; the last tile of a sequence
// may reach kMaxTile past its end.
constexpr int32_t kMaxTile = 256;
constexpr int32_t kMaxSeqlen = (1 << 30) - kMaxTile;

// The most rows of a packed tensor: cu_seqlens are 32 bits wide.
constexpr int64_t kMaxPackedRows = INT32_MAX - kMaxTile;

// The most tiles of a launch. A grid has at most 2^31 - 1 CTAs, and in a persistent grid the tile
// that a CTA counts to lies up to one round of CTAs past the last one.
constexpr int64_t kMaxTiles = INT32_MAX - 65535;

// The number of tiles of `tile` rows that all heads of all sequences have. Where 64 bits cannot
// hold it, some number above kMaxTiles.
constexpr int64_t tile_count(int32_t seqlen, int32_t tile, int32_t heads, int32_t batch) {
  int64_t const blocks = (int64_t(seqlen) + tile - 1) / tile;
  int64_t const all_heads = int64_t(heads) * batch;
  if (blocks <= 0 || all_heads <= 0) {
    return 0;
  }
  return all_heads > kMaxTiles ? all_heads : all_heads * blocks;
}

// The bound of a window that has none on this side: larger than any distance between two positions.
constexpr int32_t kUnbounded = INT32_MAX;

// The slopes of ALiBi: -slope * |i + shift - j| is added to the score of query i and key j, where
// shift = seqlen_k - seqlen_q of their sequence.
struct AlibiSlopes {
  float const* data;     // [batch, heads]; null: none
  int64_t batch_stride;  // in elements; 0 where all sequences have the same slopes
  int64_t head_stride;
};

// A bias that is added to scores, [batch, heads, seqlen_q, seqlen_k], of the type of q or fp32; or
// its gradient. Strides are in elements, 0 where one number serves the whole dimension, and that of
// seqlen_k is 0 or 1. In the gradient no two numbers may share an address, and a stride of 0 means
// that the dimension is summed. Packed sequence b has the first rows and columns of bias[b].
struct BiasTensor {
  void* data;  // null: none
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
  int32_t col_stride;
  int32_t is_float;  // 1 where it is fp32
};

// Dropout of probabilities: the one of a query and a key is dropped where its byte
// (core/dropout.h) is less than drop_count, and multiplied by keep_scale() (core/keep_scale.h)
// where it is kept.
struct DropoutOptions {
  uint64_t const* seed;  // on the device; null: no dropout
  int32_t drop_count;    // round(256 * p), at most 256; 0 where there is no dropout
};

// Keys and values in a cache: k is [pages, page_size, heads_kv, head_dim], and v is likewise. How
// many there are of a sequence only the device knows.
//
// Key j of sequence b, counted from its first one, is token t = leftpad_k[b] + j of the row r =
// batch_idx[b] of the cache. Without a table a page is such a row: token t is row t of page r. With
// one it is row t % page_size of page block_table[r, t / page_size]. Of the table only entries of
// pages are read that hold a key which the sequence's queries may see.
struct KeyCache {
  int32_t const* seqused_k;    // [batch], tokens of each sequence, padding included; null: no cache
  int32_t const* leftpad_k;    // [batch], tokens in front that are padding; null: none
  int32_t const* batch_idx;    // [batch]; null: sequence b has row b
  int32_t const* block_table;  // [rows, pages_per_sequence]; null: none
  int64_t block_table_stride;  // of its rows, in elements; that of its columns is 1
  int32_t pages_per_sequence;  // 1 without a table
  int32_t page_size;           // with a table a multiple of kPageRows
  int32_t pages;
};

// The keys that the kernel right before a forward call in its stream appends to the cache
// (append_params.h), which lets the forward begin while it still runs: where nothing that is
// written for a sequence is read or written for another one, and where k and v share no memory but
// rows of the same token.
struct AppendedKeys {
  int32_t const* seqused_k;   // [batch], the tokens before them; null: the forward waits for the
                              // end of the kernel before it reads anything
  int32_t const* cu_seqlens;  // [batch + 1], of packed ones; null: each sequence has `seqlen`
  int32_t seqlen;
  int32_t turns_q;  // not 0: that kernel writes q, too
};

// Pages are loaded in boxes of so many rows, or of a multiple.
constexpr int32_t kPageRows = 16;

struct ForwardParams {
  void const* q;  // [batch, seqlen_q, heads, head_dim], or packed [total_q, heads, head_dim]
  // k is [batch, seqlen_k, heads_kv, head_dim], or packed [total_k, heads_kv, head_dim], or a cache
  // (KeyCache); v is the same with head_dim_v columns.
  void const* k;
  void const* v;
  // The kernel writes every row. Packed rows after the last sequence get what a query that sees no
  // key gets: output 0 and LSE -infinity.
  void* o;     // [batch, seqlen_q, heads, head_dim_v], or packed [total_q, heads, head_dim_v]
  float* lse;  // [batch, heads, seqlen_q], or packed [heads, total_q], contiguous; may be null

  // int32 [batch + 1] on the device, or both null where every sequence of q has seqlen_q rows, and
  // every sequence of k seqlen_k. Of a call with a cache only q may be packed.
  int32_t const* cu_seqlens_q;
  int32_t const* cu_seqlens_k;

  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides o_stride;

  int32_t batch;
  // At most kMaxSeqlen. Where sequences are packed, at least the length of the longest one: each
  // row of a longer sequence comes out right or NaN.
  int32_t seqlen_q;
  int32_t seqlen_k;  // likewise; of a cache it decides about speed alone
  int64_t total_q;   // rows of packed q, at most kMaxPackedRows; unused otherwise
  int64_t total_k;   // rows of packed k and v, likewise
  int32_t heads;
  int32_t heads_kv;  // divides heads; query head h reads kv head h / (heads / heads_kv)
  int32_t head_dim;  // at most the row's, a multiple of 8
  int32_t head_dim_v;

  float scale;    // multiplies q.k; finite
  float softcap;  // s -> softcap * tanh(s / softcap) after the scale; 0 where there is none

  // Query i sees keys j with i + shift - window_left <= j <= i + shift + window_right, where
  // shift = seqlen_k - seqlen_q of its sequence. Causal is window_right = 0. Never negative;
  // kUnbounded where a side has no bound.
  int32_t window_left;
  int32_t window_right;

  // int32 [1], a workspace: the next tile of packed queries that a free CTA takes. Where it is
  // null, each CTA gets an equal number of tiles. What it contains before the call does not matter.
  int32_t* next_tile;

  float const* sink;  // [heads]: the logit that joins the softmax of a head's rows; null: none
  AlibiSlopes alibi_slopes;
  BiasTensor bias;
  DropoutOptions dropout;

  KeyCache cache;

  // Where there are few tiles of queries, the keys of each are divided among several CTAs (splits),
  // whose results a second kernel combines (core/key_splits.h). 0 has the call choose the number of
  // splits, 1 keeps the keys of a row of queries together. More than 1, at most kMostSplits, takes
  // a workspace, of the size that cute_attention_forward_workspace says. Where it is null there is
  // one split, whatever num_splits is. What it contains before the call does not matter.
  float* split_workspace;
  int32_t num_splits;

  // [batch, seqlen_q, heads, head_dim_v], or packed [total_q, heads, head_dim_v]: the score of
  // query i and key j is scale * (q[i].k[j] + qv[i].v[j]). Null: none. k and v may be columns of
  // one tensor, which is then read once, as in multi-head latent attention (docs/mla.md).
  void const* qv;
  Strides qv_stride;

  // Not 0: the bits of a row of the output depend on its query, and on the keys that it sees and
  // where they lie in their sequence, alone: on no other query or sequence, nor on any length. Such
  // a call has one split, whatever num_splits is, and a row that does not depend on sizes.
  int32_t batch_invariant;

  AppendedKeys appended;
};

// The most splits of a call, and the most rows of a call with more than one.
constexpr int32_t kMostSplits = 128;
constexpr int64_t kMostSplitRows = INT32_MAX;

// How many queries all heads and sequences have together. The LSE has one number for each.
template <class Params>
constexpr int64_t lse_size(Params const& params) {
  return params.heads * (params.cu_seqlens_q == nullptr ? int64_t(params.batch) * params.seqlen_q
                                                        : params.total_q);
}

// How many floats the workspace of a call with splits has: for each split and each row an output,
// and the two numbers that say what it weighs.
constexpr int64_t split_workspace_size(ForwardParams const& params, int32_t num_splits) {
  return num_splits * lse_size(params) * (int64_t(params.head_dim_v) + 2);
}

// What the caller of a forward call is to allocate and to pass.
struct ForwardWorkspace {
  int64_t split_workspace;  // floats; 0 where the keys are not divided
  int32_t num_splits;       // 1 where they are not
};

// The backward pass takes a query for one that sees no key if its LSE * log2(e) is below this: its
// gradients are 0, and it adds nothing to those of keys. All scores of such a query are below about
// -1e7, where neighbouring floats are too far apart to compute P = exp(S - LSE). Such scores come
// from something in q and k, such as a channel of -1e30, that is meant to hide keys.
constexpr float kLowestLseLog2 = -16777216.f;  // -2^24

// A member that has the name of one of ForwardParams means the same.
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

  // Workspaces of the sizes that the row asks for (BackwardWorkspace), where the kernels of the row
  // keep what they like. What they contain before the call does not matter.
  float* delta;          // begins at a multiple of 16 bytes, and so do all that are floats
  float* grad_q_sum;     // additions are fastest where it begins at a multiple of 128 bytes
  int32_t* grad_q_turn;  // not null asks for gradients that are bitwise the same in every run
  float* grad_kv_parts;  // may be null: then calls with few keys or KV heads are slower, and some
                         // with many

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

  float const* sink;  // [heads]; null where there is none: the LSE contains it
  float* grad_sink;   // [heads]; null where it is not wanted or there is no sink
  AlibiSlopes alibi_slopes;
  BiasTensor bias;
  BiasTensor grad_bias;  // each number is written; its type is that of the bias
  DropoutOptions dropout;
  float* grad_bias_parts;  // a workspace, may be null: then a bias for many sequences is slower
};

// How many elements the workspaces of a backward call need.
struct BackwardWorkspace {
  int64_t delta;
  int64_t grad_q_sum;
  int64_t grad_q_turn;    // only where the call is to be deterministic
  int64_t grad_kv_parts;  // 0 unless blocks of keys are divided into parts (core/grad_parts.h)
  // 0 unless grad_bias is small and a sum over much (core/grad_bias_tiles.h); at most 32 MB.
  int64_t grad_bias_parts;
};

}  // namespace cute_attention
