// torch_inputs.h: what the ops are given, read from the stack in the order of their schemas.
#pragma once

#include "cute_attention/config.h"
#include "torch_append.h"
#include "torch_cache.h"
#include "torch_options.h"
#include "torch_stack.h"
#include "torch_tensors.h"

namespace cute_attention {

// What forward and backward are both given: Arguments of python/cute_attention/arguments.py.
struct Inputs {
  TensorView q;
  TensorView k;
  TensorView v;
  Options options;
  OptionalTensor cu_seqlens_q = {};
  OptionalTensor cu_seqlens_k = {};
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;  // with a cache 0 for all that a sequence has room for
  OptionalTensor bias = {};
  OptionalTensor alibi_slopes = {};
  OptionalTensor sink = {};
  double dropout_p = 0;
  OptionalTensor dropout_seed = {};
  CacheTensors cache = {};
  OptionalTensor qv = {};
  NewTokens new_tokens = {};
  int64_t num_splits = 0;
  bool batch_invariant = false;

  bool packed() const { return cu_seqlens_q.has_value(); }
  int32_t device() const { return q.device; }
  DType kernel_dtype() const {
    return q.dtype == aoti_torch_dtype_float16() ? DType::Float16 : DType::BFloat16;
  }
};

// The forms in which ops take the inputs.
enum class Form {
  Full,         // each argument by itself
  Brief,        // q, k, v and a text for the options: neither packed nor with a sink
  Packed,       // the same with packed sequences
  Cached,       // k and v are a cache: attend_cache of python/cute_attention/ops/cache.py
  BriefCached,  // brief_attend_cache
};

constexpr bool is_cached(Form form) { return form == Form::Cached || form == Form::BriefCached; }

inline Options spelled_options(Stack& stack) {
  Options options;
  options.arch = arch_of(stack.text());
  options.scale = stack.real();
  options.window_left = stack.integer();
  options.window_right = stack.integer();
  options.softcap = stack.real();
  return options;
}

template <Form kForm>
Inputs inputs_of(Stack& stack) {
  TensorView const q = stack.tensor(), k = stack.tensor(), v = stack.tensor();
  if constexpr (kForm == Form::Brief) {
    return {q, k, v, brief_options<Options>(stack.text())};
  } else if constexpr (kForm == Form::Packed) {
    Inputs in{q, k, v, brief_options<Options>(stack.text())};
    in.cu_seqlens_q = stack.tensor();
    in.cu_seqlens_k = stack.tensor();
    in.max_seqlen_q = stack.integer();
    in.max_seqlen_k = stack.integer();
    return in;
  } else if constexpr (is_cached(kForm)) {
    Inputs in{q, k, v, {}};
    NewTokens& added = in.new_tokens;
    in.cache.seqused_k = stack.tensor();
    std::string const text = stack.text();
    added.k = stack.optional_tensor();
    added.v = stack.optional_tensor();
    in.cache.block_table = stack.optional_tensor();
    added.cos = stack.optional_tensor();
    added.sin = stack.optional_tensor();
    in.cu_seqlens_q = stack.optional_tensor();
    in.max_seqlen_q = stack.optional_integer().value_or(q.dim > 0 ? q.sizes[0] : 0);
    added.cu_seqlens = stack.optional_tensor();
    in.max_seqlen_k = stack.optional_integer().value_or(0);
    if constexpr (kForm == Form::Cached) {
      in.cache.batch_idx = stack.optional_tensor();
      in.cache.leftpad_k = stack.optional_tensor();
      added.seqlens = stack.optional_tensor();
      in.alibi_slopes = stack.optional_tensor();
      in.sink = stack.optional_tensor();
      in.qv = stack.optional_tensor();
    }
    auto const options = brief_options<CacheOptions>(text);
    in.options = options;
    in.num_splits = options.num_splits;
    in.batch_invariant = options.batch_invariant;
    added.interleaved = options.rotary_interleaved;
    added.turns_each_query = options.turns_each_query;
    return in;
  } else {
    Inputs in{q, k, v, spelled_options(stack)};
    in.cu_seqlens_q = stack.optional_tensor();
    in.cu_seqlens_k = stack.optional_tensor();
    in.max_seqlen_q = stack.integer();
    in.max_seqlen_k = stack.integer();
    in.bias = stack.optional_tensor();
    in.alibi_slopes = stack.optional_tensor();
    in.sink = stack.optional_tensor();
    in.dropout_p = stack.real();
    in.dropout_seed = stack.optional_tensor();
    return in;
  }
}

}  // namespace cute_attention
