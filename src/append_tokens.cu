// append_tokens.cu: the kernel that turns queries and new keys by rotary embeddings and writes new
// keys and values to a cache (append_params.h).
#include "append_tokens.h"

#include <cuda_runtime.h>

#include "cute_attention/core/address.h"
#include "cute_attention/core/append_place.h"
#include "cute_attention/core/dependent_launch.h"
#include "cute_attention/element.h"

namespace cute_attention {
namespace {

// The kernel is launched and ended within a decode step, which takes 20 us, and its code then
// comes from memory. So there is one path for queries, keys and values, whose loads do not wait for
// each other, and CTAs are large: a forward that begins meanwhile runs on the SMs without one.
constexpr int kThreads = 512;
constexpr int64_t kMostCtas = 1 << 16;  // of queries, keys or values; more take several rounds
constexpr int kVector = 8;              // elements of 16 bytes

// Eight neighbouring numbers of a head.
template <class Element>
union Vector {
  uint4 bits;
  Element values[kVector];
  __device__ Vector() {}
};

// Queries, new keys or new values, and where they go.
struct Tokens {
  void const* from;
  void* to;
  Strides from_stride;
  Strides to_stride;
  int32_t const* cu_seqlens;  // [batch + 1]; null: each sequence has `seqlen`
  int32_t seqlen;
  int32_t heads;
  int32_t of_head;  // vectors
  bool turns;
  bool turns_each;  // token i has the angle of new key i; else of the first one
  bool goes_to_cache;
  int64_t vectors;
  int32_t ctas;

  Tokens& count(int64_t total, int32_t batch) {
    int64_t const rows = cu_seqlens != nullptr ? total : int64_t(batch) * seqlen;
    vectors = rows * heads * of_head;
    int64_t const wanted = (vectors + kThreads - 1) / kThreads;
    ctas = int32_t(wanted < kMostCtas ? wanted : kMostCtas);
    return *this;
  }
};
constexpr int kKinds = 3;
struct Work {
  Tokens kinds[kKinds];  // queries, keys, values

  explicit Work(AppendParams const& p)
      : kinds{{p.q, p.turned_q, p.q_stride, p.turned_q_stride, p.cu_seqlens_q, p.seqlen_q,
               p.rotary.cos == nullptr ? 0 : p.heads, p.head_dim / kVector, true,
               p.rotary.turns_each_query != 0, false},
              {p.k, p.k_cache, p.k_stride, p.k_cache_stride, p.cu_seqlens_new, p.seqlen_new,
               p.heads_kv, p.head_dim / kVector, p.rotary.cos != nullptr, true, true},
              {p.v, p.v_cache, p.v_stride, p.v_cache_stride, p.cu_seqlens_new, p.seqlen_new,
               p.heads_kv, p.head_dim_v / kVector, false, false, true}} {
    kinds[0].count(p.total_q, p.batch);
    kinds[1].count(p.total_new, p.batch);
    kinds[2].count(p.total_new, p.batch);
  }
};

// Numbers [col, col + kVector) of a head that begins at `head`, turned by a row of cos and sin.
// Each product and sum is rounded, as in PyTorch's operations. What is not turned is computed from
// some pair in place of the number's own, and is not used.
template <class Element, class Angle>
__device__ void turn(Vector<Element>& result, RotaryOptions const& rotary, Element const* head,
                     int32_t col, int32_t row) {
  Angle const* const cos = static_cast<Angle const*>(rotary.cos) + row * rotary.cos_stride;
  Angle const* const sin = static_cast<Angle const*>(rotary.sin) + row * rotary.sin_stride;
  Element others[kVector];
  Angle c[kVector], s[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    RotaryPair const pair = rotary_pair(rotary, min(col + i, rotary.rotary_dim - 1));
    others[i] = head[pair.partner];
    c[i] = cos[pair.angle];
    s[i] = sin[pair.angle];
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float const own = float(result.values[i]), other = float(others[i]);
    float const along = __fmul_rn(own, float(c[i])), across = __fmul_rn(other, float(s[i]));
    bool const is_first = rotary_pair(rotary, col + i).is_first;
    Element const turned(is_first ? __fsub_rn(along, across) : __fadd_rn(across, along));
    result.values[i] = col + i < rotary.rotary_dim ? turned : result.values[i];
  }
}

// Writes vector `index` of [rows, heads, vectors of a head].
template <class Element, class Angle>
__device__ void write_vector(AppendParams const& params, Tokens const& tokens, int64_t index) {
  int32_t const of_row = tokens.heads * tokens.of_head;
  int64_t const row = index / of_row;
  int32_t const in_row = int32_t(index - row * of_row);
  int32_t const head = in_row / tokens.of_head;
  int32_t const col = (in_row - head * tokens.of_head) * kVector;
  TokenPlace const token = token_place(tokens.cu_seqlens, params.batch, tokens.seqlen, row);
  if (token.sequence < 0) {
    return;
  }
  int64_t const from_row = tokens.cu_seqlens != nullptr ? row : token.place;
  Element const* const from = row_pointer(static_cast<Element const*>(tokens.from),
                                          tokens.from_stride, token.sequence, head, from_row);
  Vector<Element> values;
  values.bits = *reinterpret_cast<uint4 const*>(from + col);
  int32_t const used = params.cache.seqused_k[token.sequence];
  int32_t to_batch = token.sequence;
  int64_t to_row = from_row;
  if (tokens.goes_to_cache) {
    CachePlace const place = cache_place(params.cache, token.sequence, int64_t(used) + token.place);
    if (place.page < 0) {
      return;
    }
    to_batch = place.page;
    to_row = place.row;
  }
  if (tokens.turns && col < params.rotary.rotary_dim) {
    int32_t const* const seqlens = params.rotary.seqlens;
    int32_t const angle =
        angle_row(params.rotary, seqlens == nullptr ? used : seqlens[token.sequence],
                  tokens.turns_each ? token.place : 0);
    turn<Element, Angle>(values, params.rotary, from, col, angle);
  }
  Element* const to =
      row_pointer(static_cast<Element*>(tokens.to), tokens.to_stride, to_batch, head, to_row);
  *reinterpret_cast<uint4*>(to + col) = values.bits;
}

// At least one CTA on an SM: without that bound ptxas held one of these kernels to 64 registers on
// sm_80, and it spilled.
template <class Element, class Angle>
__global__ void __launch_bounds__(kThreads, 1)
    append_tokens_kernel(__grid_constant__ AppendParams const params,
                         __grid_constant__ Work const work) {
  if (threadIdx.x == 0) {
    start_kernel_after();  // a forward of the cache: it waits before it reads what this one writes
  }
  int kind = 0;
  int32_t cta = int32_t(blockIdx.x);
  while (kind < kKinds && cta >= work.kinds[kind].ctas) {
    cta -= work.kinds[kind++].ctas;
  }
  if (kind < kKinds) {  // otherwise the only CTA, with nothing to write but lengths
    Tokens const& tokens = work.kinds[kind];
    int64_t const step = int64_t(tokens.ctas) * kThreads;
#pragma unroll 1
    for (int64_t index = int64_t(cta) * kThreads + threadIdx.x; index < tokens.vectors;
         index += step) {
      write_vector<Element, Angle>(params, tokens, index);
    }
  }
  int64_t const step = int64_t(gridDim.x) * kThreads;
#pragma unroll 1
  for (int64_t sequence = int64_t(blockIdx.x) * kThreads + threadIdx.x; sequence < params.batch;
       sequence += step) {
    int64_t const before = params.cache.seqused_k[sequence];
    int64_t const used = before + new_tokens(params, int32_t(sequence));
    params.used[sequence] = int32_t(used < INT32_MAX ? used : INT32_MAX);
  }
}

template <class Element, class Angle>
cudaError_t launch_with(AppendParams const& params, cudaStream_t stream) {
  Work const work(params);
  int32_t ctas = 0;
  for (Tokens const& tokens : work.kinds) {
    if (int64_t{tokens.heads} * tokens.of_head > INT32_MAX) {  // 32 GB for a token
      return cudaErrorInvalidConfiguration;
    }
    ctas += tokens.ctas;
  }
  if (ctas == 0 && params.batch == 0) {
    return cudaSuccess;
  }
  append_tokens_kernel<Element, Angle>
      <<<unsigned(ctas > 0 ? ctas : 1), kThreads, 0, stream>>>(params, work);
  return cudaGetLastError();
}

template <class Element>
cudaError_t launch(AppendParams const& params, cudaStream_t stream) {
  return params.rotary.is_float != 0 ? launch_with<Element, float>(params, stream)
                                     : launch_with<Element, Element>(params, stream);
}

}  // namespace

int32_t append_tokens(AppendParams const* params, DType dtype, void* stream) {
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  return dtype == DType::Float16 ? launch<cutlass::half_t>(*params, cuda_stream)
                                 : launch<cutlass::bfloat16_t>(*params, cuda_stream);
}

}  // namespace cute_attention
