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

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = 1 << 16;  // what is more takes several rounds
constexpr int kVector = 8;              // elements of 16 bytes

// Eight neighbouring numbers of a head.
template <class Element>
union Vector {
  uint4 bits;
  Element values[kVector];
  __device__ Vector() {}
};

template <class Element>
__device__ float angle_of(RotaryOptions const& rotary, void const* table, int64_t index) {
  return rotary.is_float != 0 ? static_cast<float const*>(table)[index]
                              : float(static_cast<Element const*>(table)[index]);
}

// Numbers [col, col + kVector) of a head that begins at `head`, turned by a row of cos and sin.
// Each product and sum is rounded, as in PyTorch's operations.
template <class Element>
__device__ Vector<Element> turned(RotaryOptions const& rotary, Element const* head, int32_t col,
                                  int32_t row) {
  Vector<Element> result;
  result.bits = *reinterpret_cast<uint4 const*>(head + col);
  for (int i = 0; i < kVector && col + i < rotary.rotary_dim; ++i) {
    RotaryPair const pair = rotary_pair(rotary, col + i);
    float const c = angle_of<Element>(rotary, rotary.cos, row * rotary.cos_stride + pair.angle);
    float const s = angle_of<Element>(rotary, rotary.sin, row * rotary.sin_stride + pair.angle);
    float const own = float(result.values[i]), other = float(head[pair.partner]);
    result.values[i] = Element(pair.is_first ? __fsub_rn(__fmul_rn(own, c), __fmul_rn(other, s))
                                             : __fadd_rn(__fmul_rn(other, s), __fmul_rn(own, c)));
  }
  return result;
}

// One of the vectors of [rows, heads, cols].
struct VectorPlace {
  int64_t row;
  int32_t head;
  int32_t col;
};
__device__ VectorPlace vector_place(int64_t index, int32_t heads, int32_t cols) {
  int32_t const of_head = cols / kVector;
  int64_t const head_index = index / of_head;
  return {head_index / heads, int32_t(head_index % heads), int32_t(index % of_head) * kVector};
}

// The angle of a sequence's first new key.
__device__ int32_t first_angle(AppendParams const& params, int32_t sequence) {
  int32_t const* const seqlens = params.rotary.seqlens;
  return (seqlens == nullptr ? params.cache.seqused_k : seqlens)[sequence];
}

template <class Element>
__device__ void turn_query(AppendParams const& params, int64_t index) {
  VectorPlace const at = vector_place(index, params.heads, params.head_dim);
  TokenPlace const token = token_place(params.cu_seqlens_q, params.batch, params.seqlen_q, at.row);
  if (token.sequence < 0) {
    return;
  }
  bool const packed = params.cu_seqlens_q != nullptr;
  int64_t const row = packed ? at.row : token.place;
  Element const* const from = row_pointer(static_cast<Element const*>(params.q), params.q_stride,
                                          token.sequence, at.head, row);
  Element* const to = row_pointer(static_cast<Element*>(params.turned_q), params.turned_q_stride,
                                  token.sequence, at.head, row);
  int32_t const angle = angle_row(params.rotary, first_angle(params, token.sequence),
                                  params.rotary.turns_each_query != 0 ? token.place : 0);
  *reinterpret_cast<uint4*>(to + at.col) = turned(params.rotary, from, at.col, angle).bits;
}

// What is written of new keys, or of new values.
struct Source {
  void const* tokens;
  Strides stride;
  void* cache;
  Strides cache_stride;
  int32_t cols;
  bool turns;
};

template <class Element>
__device__ void append(AppendParams const& params, Source const& source, int64_t index) {
  VectorPlace const at = vector_place(index, params.heads_kv, source.cols);
  TokenPlace const token =
      token_place(params.cu_seqlens_new, params.batch, params.seqlen_new, at.row);
  if (token.sequence < 0) {
    return;
  }
  CachePlace const place = cache_place(
      params.cache, token.sequence, int64_t(params.cache.seqused_k[token.sequence]) + token.place);
  if (place.page < 0) {
    return;
  }
  int64_t const row = params.cu_seqlens_new != nullptr ? at.row : token.place;
  Element const* const from = row_pointer(static_cast<Element const*>(source.tokens), source.stride,
                                          token.sequence, at.head, row);
  Element* const to = row_pointer(static_cast<Element*>(source.cache), source.cache_stride,
                                  place.page, at.head, place.row);
  Vector<Element> values;
  if (source.turns) {
    values = turned(params.rotary, from, at.col,
                    angle_row(params.rotary, first_angle(params, token.sequence), token.place));
  } else {
    values.bits = *reinterpret_cast<uint4 const*>(from + at.col);
  }
  *reinterpret_cast<uint4*>(to + at.col) = values.bits;
}

// How many vectors there are of queries, keys and values.
struct Work {
  int64_t q, k, v;

  Work(AppendParams const& p) {
    int64_t const rows_q = p.cu_seqlens_q != nullptr ? p.total_q : int64_t(p.batch) * p.seqlen_q;
    int64_t const rows =
        p.cu_seqlens_new != nullptr ? p.total_new : int64_t(p.batch) * p.seqlen_new;
    q = p.rotary.cos == nullptr ? 0 : rows_q * p.heads * (p.head_dim / kVector);
    k = rows * p.heads_kv * (p.head_dim / kVector);
    v = rows * p.heads_kv * (p.head_dim_v / kVector);
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads)
    append_tokens_kernel(__grid_constant__ AppendParams const params,
                         __grid_constant__ Work const work) {
  if (threadIdx.x == 0) {
    start_kernel_after();  // a forward of the cache: it waits for this one's end before it reads
  }
  Source const keys{params.k,        params.k_stride,
                    params.k_cache,  params.k_cache_stride,
                    params.head_dim, params.rotary.cos != nullptr};
  Source const values{
      params.v, params.v_stride, params.v_cache, params.v_cache_stride, params.head_dim_v, false};
  int64_t const first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int64_t const step = int64_t(gridDim.x) * kThreads;
  for (int64_t index = first; index < work.q + work.k + work.v; index += step) {
    if (index < work.q) {
      turn_query<Element>(params, index);
    } else if (index < work.q + work.k) {
      append<Element>(params, keys, index - work.q);
    } else {
      append<Element>(params, values, index - work.q - work.k);
    }
  }
  for (int64_t sequence = first; sequence < params.batch; sequence += step) {
    int64_t const before = params.cache.seqused_k[sequence];
    int64_t const used = before + new_tokens(params, int32_t(sequence));
    params.used[sequence] = int32_t(used < INT32_MAX ? used : INT32_MAX);
  }
}

template <class Element>
cudaError_t launch(AppendParams const& params, cudaStream_t stream) {
  Work const work(params);
  int64_t const total = work.q + work.k + work.v;
  int64_t const threads = total > params.batch ? total : params.batch;
  int64_t const ctas = (threads + kThreads - 1) / kThreads;
  if (ctas == 0) {
    return cudaSuccess;
  }
  append_tokens_kernel<Element>
      <<<unsigned(ctas < kMostCtas ? ctas : kMostCtas), kThreads, 0, stream>>>(params, work);
  return cudaGetLastError();
}

}  // namespace

int32_t append_tokens(AppendParams const* params, DType dtype, void* stream) {
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  return dtype == DType::Float16 ? launch<cutlass::half_t>(*params, cuda_stream)
                                 : launch<cutlass::bfloat16_t>(*params, cuda_stream);
}

}  // namespace cute_attention
