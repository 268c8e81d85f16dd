// torch_append.h: the tensors of a call that appends to a cache, as the kernel takes them.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "cute_attention/append_params.h"
#include "torch_cache.h"
#include "torch_tensors.h"

namespace cute_attention {

// What such a call is given beside q and the cache.
struct NewTokens {
  OptionalTensor k;           // [batch, seqlen_new, heads_kv, head_dim], packed [total_new, ...]
  OptionalTensor v;           // likewise; both or neither
  OptionalTensor cu_seqlens;  // int32 [batch + 1], of packed ones
  OptionalTensor cos;         // [positions, rotary_dim / 2], float32 or q's dtype
  OptionalTensor sin;         // likewise; both or neither
  bool interleaved;
  OptionalTensor seqlens;  // int32 [batch]: the angles of the first new keys
  bool turns_each_query;
};

// The dtypes, devices and shapes fit those of q and of the caches.
inline void check_new_tokens(NewTokens const& given, TensorView const& q, TensorView const& k_cache,
                             TensorView const& v_cache, int64_t batch) {
  STD_TORCH_CHECK(given.k.has_value() == given.v.has_value() &&
                      given.cos.has_value() == given.sin.has_value() && (given.k || !given.cos),
                  "cute_attention: k and v come together, and rotary_cos and rotary_sin with them");
  if (!given.k) return;
  STD_TORCH_CHECK(!given.cu_seqlens ||
                      (given.cu_seqlens->is_beside(q) && given.cu_seqlens->numel() == batch + 1),
                  "cute_attention: cu_seqlens_k_new must be [batch + 1] on q's device");
  int64_t const dim = given.cu_seqlens ? 3 : 4;
  for (auto const& [tokens, cache] :
       {std::pair<TensorView, TensorView>{*given.k, k_cache}, {*given.v, v_cache}}) {
    bool same = tokens.is_beside(q) && tokens.dtype == q.dtype && tokens.dim == dim &&
                tokens.sizes[0] == given.k->sizes[0] && (dim == 3 || tokens.sizes[0] == batch) &&
                tokens.sizes[dim - 3] == given.k->sizes[dim - 3];
    for (int64_t i = 1; same && i <= 2; ++i) same = tokens.sizes[dim - i] == cache.sizes[4 - i];
    STD_TORCH_CHECK(same,
                    "cute_attention: k and v must be like the caches, [batch, seqlen_new, "
                    "heads_kv, head_dim] or packed [total_new, heads_kv, head_dim]");
    bool writable = reinterpret_cast<uintptr_t>(cache.data) % 16 == 0 && cache.strides[3] == 1;
    for (int64_t i = 0; i < 4; ++i) {
      writable = writable && (i == 3 || cache.strides[i] % kVectorElements == 0);
    }
    STD_TORCH_CHECK(writable && cache.sizes[3] % kVectorElements == 0,
                    "cute_attention: caches that the kernel writes must begin at multiples of 16 "
                    "bytes, as must their rows");
  }
  if (!given.cos) return;
  TensorView const &cos = *given.cos, &sin = *given.sin;
  STD_TORCH_CHECK(
      cos.is_beside(q) && sin.is_beside(q) && cos.dim == 2 && sin.dim == 2 &&
          cos.dtype == sin.dtype &&
          (cos.dtype == q.dtype || cos.dtype == aoti_torch_dtype_float32()) &&
          cos.sizes[0] == sin.sizes[0] && cos.sizes[1] == sin.sizes[1] &&
          2 * cos.sizes[1] <= k_cache.sizes[3],
      "cute_attention: rotary_cos and rotary_sin must be [positions, rotary_dim / 2] of "
      "float32 or q's dtype on q's device");
}

inline RotaryOptions rotary_of(NewTokens const& given, TensorView const& q, int64_t batch,
                               std::vector<Tensor>& copies) {
  RotaryOptions rotary{};
  if (!given.cos) return rotary;
  auto const table = [&](TensorView const& angles) {
    return angles.sizes[1] <= 1 || angles.strides[1] == 1 ? angles : copied(angles, copies);
  };
  TensorView const cos = table(*given.cos), sin = table(*given.sin);
  rotary.cos = cos.data;
  rotary.sin = sin.data;
  rotary.cos_stride = cos.sizes[0] > 1 ? cos.strides[0] : 0;
  rotary.sin_stride = sin.sizes[0] > 1 ? sin.strides[0] : 0;
  rotary.positions = to_int32(cos.sizes[0], "rotary_cos.shape[0]");
  rotary.rotary_dim = to_int32(2 * cos.sizes[1], "rotary_dim");
  rotary.is_interleaved = given.interleaved;
  rotary.is_float = cos.dtype == aoti_torch_dtype_float32();
  rotary.seqlens = numbers_of(given.seqlens, "rotary_seqlens", q, batch);
  rotary.turns_each_query = given.turns_each_query;
  return rotary;
}

// The call for the cache of `params`, whose q, batch and lengths it has too, but for the memory
// that it writes beside the cache: `used`, and turned_q, which is contiguous. For tensors that
// passed check_new_tokens().
inline AppendParams append_params(ForwardParams const& params, NewTokens const& given,
                                  TensorView const& q, TensorView const& k_cache,
                                  TensorView const& v_cache, std::vector<Tensor>& copies) {
  TensorView const k = readable(*given.k, copies), v = readable(*given.v, copies);
  bool const packed = given.cu_seqlens.has_value();
  AppendParams append{};
  append.k = k.data;
  append.v = v.data;
  append.k_cache = k_cache.data;
  append.v_cache = v_cache.data;
  append.k_stride = strides_of(k);
  append.v_stride = strides_of(v);
  append.k_cache_stride = strides_of(k_cache);
  append.v_cache_stride = strides_of(v_cache);
  append.cu_seqlens_new = cu_seqlens_of(given.cu_seqlens, "cu_seqlens_k_new");
  append.cu_seqlens_q = params.cu_seqlens_q;
  append.batch = params.batch;
  append.seqlen_new = packed ? 0 : to_int32(k.sizes[1], "seqlen_new");
  append.seqlen_q = params.cu_seqlens_q == nullptr ? params.seqlen_q : 0;
  append.total_new = packed ? k.sizes[0] : 0;
  append.total_q = params.total_q;
  append.heads = params.heads;
  append.heads_kv = params.heads_kv;
  append.head_dim = params.head_dim;
  append.head_dim_v = params.head_dim_v;
  append.cache = params.cache;
  append.q = params.q;
  append.q_stride = params.q_stride;
  append.turned_q_stride = contiguous_strides(q);
  append.rotary = rotary_of(given, q, params.batch, copies);
  return append;
}

// Whether no two rows or pages of a cache [rows, tokens, heads, columns] have memory in common.
inline bool rows_are_apart(TensorView const& cache) {
  auto const span = [&](int dim) { return (cache.sizes[dim] - 1) * cache.strides[dim]; };
  int64_t const row = span(2) + cache.sizes[3];
  return cache.strides[0] >= span(1) + row || cache.strides[1] >= span(0) + row;
}

// Whether caches share no memory, or only that of the same token of the same row.
inline bool tokens_are_apart(TensorView const& k, TensorView const& v) {
  constexpr int64_t kBytes = 2;
  // Most caches have the tokens of a row, or of a page, side by side; in others the first token of
  // all rows comes first. So blocks follow each other, of tokens or of rows.
  int const block = k.strides[0] >= k.strides[1] ? 0 : 1, in_block = 1 - block;
  // The elements that memory spans from the first one of a token, of a block and of all on.
  struct Spans {
    int64_t token, block, all;
  };
  auto const spans = [&](TensorView const& cache) {
    auto const span = [&](int dim) { return (cache.sizes[dim] - 1) * cache.strides[dim]; };
    int64_t const token = cache.sizes[3] + span(2), of_block = token + span(in_block);
    return Spans{token, of_block, of_block + span(block)};
  };
  Spans const of_k = spans(k), of_v = spans(v);
  int64_t const between =
      int64_t(reinterpret_cast<uintptr_t>(v.data)) - int64_t(reinterpret_cast<uintptr_t>(k.data));
  if (between >= kBytes * of_k.all || -between >= kBytes * of_v.all) return true;
  bool const same_strides = std::equal(k.strides, k.strides + 3, v.strides);
  int64_t const behind = between / kBytes;  // by so many elements v begins after k
  bool const beside_token = behind >= 0 && behind + of_v.token <= k.strides[in_block];
  bool const behind_block = behind >= of_k.block && behind + of_v.block <= k.strides[block];
  return same_strides && (beside_token || behind_block);
}

// What a forward call behind `append` in the stream is told, so that it may begin while new keys
// are written; nothing where the memory of a new token may be that of another one. Rows of the
// cache and pages of two sequences are the caller's to keep apart (attention_with_cache).
inline AppendedKeys appended_keys(AppendParams const& append, NewTokens const& given,
                                  TensorView const& k_cache, TensorView const& v_cache) {
  // Without new keys nothing may be launched; then the kernel before is any.
  bool const early = given.k->numel() > 0 && rows_are_apart(k_cache) && rows_are_apart(v_cache) &&
                     tokens_are_apart(k_cache, v_cache);
  if (!early) return {};
  return {append.cache.seqused_k, append.cu_seqlens_new, append.seqlen_new,
          append.rotary.cos != nullptr};
}

}  // namespace cute_attention
