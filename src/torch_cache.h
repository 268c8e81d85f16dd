// torch_cache.h: the tensors of a call with a KV cache, as the kernels take them.
#pragma once

#include <algorithm>

#include "torch_tensors.h"

namespace cute_attention {

// What a call with a cache is given beside q, k and v.
struct CacheTensors {
  OptionalTensor seqused_k;    // int32 [batch]
  OptionalTensor leftpad_k;    // int32 [batch]
  OptionalTensor batch_idx;    // int32 [batch]
  OptionalTensor block_table;  // int32 [rows, pages_per_sequence]
};

// The dtypes, devices and shapes of q and of a cache [pages, page_size, heads_kv, head_dim] fit
// together.
inline void check_cached_inputs(TensorView const& q, TensorView const& k, TensorView const& v,
                                bool packed) {
  int64_t const dim = packed ? 3 : 4;
  STD_TORCH_CHECK(q.dim == dim && k.dim == 4 && v.dim == 4, "cute_attention: q must have ", dim,
                  " dimensions, k and v of a cache 4");
  STD_TORCH_CHECK(q.is_cuda && k.is_beside(q) && v.is_beside(q),
                  "cute_attention: q, k and v must be on one CUDA device");
  STD_TORCH_CHECK(
      (q.dtype == aoti_torch_dtype_float16() || q.dtype == aoti_torch_dtype_bfloat16()) &&
          k.dtype == q.dtype && v.dtype == q.dtype,
      "cute_attention: q, k and v must all be float16 or all bfloat16");
  int64_t const heads = q.sizes[dim - 2], heads_kv = k.sizes[2];
  STD_TORCH_CHECK(heads_kv == 0 ? heads == 0 : heads % heads_kv == 0,
                  "cute_attention: the heads of k must divide those of q");
  STD_TORCH_CHECK(k.sizes[0] == v.sizes[0] && k.sizes[1] == v.sizes[1] && heads_kv == v.sizes[2] &&
                      k.sizes[3] == q.sizes[dim - 1],
                  "cute_attention: the shapes of q, k and v do not match");
}

// qv has q's shape, but as many columns as v.
inline void check_qv(TensorView const& qv, TensorView const& q, TensorView const& v) {
  int64_t const last = q.dim - 1;
  bool same =
      qv.dim == q.dim && qv.is_beside(q) && qv.dtype == q.dtype && qv.sizes[last] == v.sizes[3];
  for (int64_t i = 0; same && i < last; ++i) same = qv.sizes[i] == q.sizes[i];
  STD_TORCH_CHECK(same,
                  "cute_attention: qv must have q's dtype and device, and its shape but for the "
                  "last dimension, which is that of v");
}

// Contiguous int32 numbers of the sequences; null where there are none.
inline int32_t const* numbers_of(OptionalTensor const& numbers, char const* name,
                                 TensorView const& q, int64_t batch) {
  if (!numbers) return nullptr;
  STD_TORCH_CHECK(numbers->is_beside(q) && numbers->dtype == aoti_torch_dtype_int32() &&
                      numbers->dim == 1 && numbers->sizes[0] == batch && numbers->is_contiguous(),
                  "cute_attention: ", name,
                  " must be a contiguous int32 tensor [batch] on q's device");
  return static_cast<int32_t const*>(numbers->data);
}

inline KeyCache cache_of(CacheTensors const& given, TensorView const& k, TensorView const& q,
                         int64_t batch) {
  KeyCache cache{};
  cache.seqused_k = numbers_of(given.seqused_k, "seqused_k", q, batch);
  cache.leftpad_k = numbers_of(given.leftpad_k, "leftpad_k", q, batch);
  cache.batch_idx = numbers_of(given.batch_idx, "cache_batch_idx", q, batch);
  cache.pages = to_int32(k.sizes[0], "k.shape[0]");
  cache.page_size = to_int32(k.sizes[1], "k.shape[1]");
  cache.pages_per_sequence = 1;
  if (given.block_table) {
    TensorView const& table = *given.block_table;
    STD_TORCH_CHECK(
        table.is_beside(q) && table.dtype == aoti_torch_dtype_int32() && table.dim == 2 &&
            (given.batch_idx || table.sizes[0] >= batch) &&
            (table.sizes[1] <= 1 || table.strides[1] == 1),
        "cute_attention: block_table must be an int32 tensor [batch, pages of a sequence] on q's "
        "device with a last stride of 1");
    // No sequence has more than kMaxSeqlen tokens, however wide the table is.
    cache.pages_per_sequence = static_cast<int32_t>(
        std::min<int64_t>(table.sizes[1], kMaxSeqlen / std::max(cache.page_size, 1)));
    cache.block_table = static_cast<int32_t const*>(table.data);
    cache.block_table_stride = table.sizes[0] > 1 ? table.strides[0] : 0;
  }
  return cache;
}

// The length of the longest sequence, of which `said` is a bound, or 0: at most what there is room
// for.
inline int32_t longest_of(KeyCache const& cache, int32_t said) {
  int64_t const room = int64_t{cache.pages_per_sequence} * cache.page_size;
  STD_TORCH_CHECK(room > 0 && cache.pages > 0, "cute_attention: k and v are a cache without room");
  return static_cast<int32_t>(said == 0 ? room : std::min<int64_t>(said, room));
}

}  // namespace cute_attention
