// core/leftover_key.h: the backward pass where one key is left over behind whole blocks of keys, as
// with the class token of a vision transformer: 257 = 2 x 128 + 1 keys.
//
// A block of keys takes a CTA of the backward kernel the same time whether it has one key or all.
// So where all queries see all keys the kernel before, which reads dO anyway, computes what the
// last key gives, without MMAs, and the backward kernel is launched for the keys before it:
//
//   backward_prepare  P and dS of each query and the key, in floats; it writes dS, and the sums of
//                     dK and dV over each tile of queries
//   backward_finish   adds dS K to dQ, and adds up the sums of the tiles, in their order
#pragma once

#include <cutlass/array.h>

#include <cute/config.hpp>
#include <cute/tensor.hpp>

#include "cute_attention/core/address.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/params.h"

namespace cute_attention {

// Whether a call has a leftover key, where the backward kernel has blocks of `tile_n` keys and
// `ctas` CTAs run at the same time. It has none where these run all blocks at once: then one block
// more takes no time. Nor with more keys: a first form of this took up to four, and with one was
// 1.10 times as fast as with a block more, with three 0.92 times (257 and 259 keys, head dim 64,
// H100).
constexpr bool has_leftover_key(BackwardParams const& params, int32_t tile_n, int64_t ctas) {
  bool const is_dense = params.cu_seqlens_q == nullptr && params.cu_seqlens_k == nullptr;
  bool const sees_all =
      params.window_left >= params.seqlen_k - 1 && params.window_right >= params.seqlen_q - 1;
  return is_dense && sees_all && params.seqlen_q > 0 && params.seqlen_k > tile_n &&
         params.seqlen_k % tile_n == 1 &&
         tile_count(params.seqlen_k, tile_n, params.heads_kv, params.batch) > ctas;
}

// How many floats the workspace of a leftover key has: dS, one number for each query, as the LSE;
// and the sums, [tiles of queries, cols].
//   cols  of dK and dV together
constexpr int64_t leftover_key_numbers(BackwardParams const& params, int32_t tile_m, int32_t cols) {
  return lse_size(params) + work_tiles(params, tile_m) * cols;
}

//   Traits   Element, kTileM, kHeadDim and kHeadDimV of the backward kernel
//   params   of a launch with a leftover key: they count the keys before it alone
//   numbers  its workspace
template <class Traits>
struct LeftoverKey {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kHeadDimV = Traits::kHeadDimV;
  static constexpr int kCols = kHeadDim + kHeadDimV;  // dK of the key, and behind it dV

  BackwardParams const& params;
  float* const numbers;

  // The sums of a tile of queries: (COLS).
  CUTE_DEVICE float* sums(int32_t batch, int32_t head, int m_block) const {
    int64_t const m_blocks = ceil_div(params.seqlen_q, kTileM);
    int64_t const tile = (int64_t{batch} * params.heads + head) * m_blocks + m_block;
    return numbers + lse_size(params) + tile * kCols;
  }
  CUTE_DEVICE int32_t head_kv(int32_t head) const {
    return head / (params.heads / params.heads_kv);
  }
  // The row of the key, of k or v.
  CUTE_DEVICE Element const* row(void const* tensor, Strides const& stride, int32_t batch,
                                 int32_t head_kv) const {
    return row_pointer(static_cast<Element const*>(tensor), stride, batch, head_kv,
                       params.seqlen_k);
  }
};

// What backward_prepare computes of a tile of queries.
//   kThreads     of its CTAs
//   kRowThreads  neighbouring threads that share a row, of which each has kVectors vectors, in turn
template <class Traits, int kThreads, int kRowThreads, int kVectors>
struct LeftoverKeyOfTile : LeftoverKey<Traits> {
  using Base = LeftoverKey<Traits>;
  using Element = typename Base::Element;
  using Base::kCols, Base::kHeadDim, Base::kHeadDimV, Base::numbers, Base::params;
  static constexpr int kVector = 16 / int(sizeof(Element));
  static constexpr int kOwn = kVectors * kVector;  // columns of a thread
  using Vector = cutlass::AlignedArray<Element, kVector>;

  WorkTile const& work;
  int const lane;  // of the threads of a row
  float const scale_log2;
  Vector k[kVectors], v[kVectors];
  float grad_k[kOwn] = {}, grad_v[kOwn] = {};  // of the thread's rows

  CUTE_DEVICE LeftoverKeyOfTile(BackwardParams const& params, float* numbers, WorkTile const& work,
                                int lane)
      : Base{params, numbers},
        work(work),
        lane(lane),
        scale_log2(BackwardScores<score_mods::None>(params).scale_log2) {
    int32_t const head_kv = Base::head_kv(work.head);
    load(k, Base::row(params.k, params.k_stride, work.batch, head_kv), params.head_dim);
    load(v, Base::row(params.v, params.v_stride, work.batch, head_kv), params.head_dim_v);
  }

  // Loads this thread's columns of q of a row; past the end of the sequence, of its last row.
  CUTE_DEVICE void load_query(Vector (&q)[kVectors], int row) const {
    load(q,
         row_pointer(static_cast<Element const*>(params.q), params.q_stride, work.batch, work.head,
                     min_of(row, params.seqlen_q - 1)),
         params.head_dim);
  }

  // Adds a row, which all of its threads have; one past the end of the sequence adds nothing.
  //   q, grad_o  its columns of this thread
  CUTE_DEVICE void add(int row, Vector const (&q)[kVectors], Vector const (&grad_o)[kVectors],
                       float lse_log2, float delta) {
    float score = 0.f, grad_p = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      score += at(q, i) * at(k, i);
      grad_p += at(grad_o, i) * at(v, i);
    }
    CUTE_UNROLL
    for (int offset = kRowThreads / 2; offset > 0; offset /= 2) {
      score += __shfl_xor_sync(0xffffffffu, score, offset);
      grad_p += __shfl_xor_sync(0xffffffffu, grad_p, offset);
    }
    bool const inside = row < params.seqlen_q;
    float const p = inside ? exp2f(score * scale_log2 - lse_log2) : 0.f;
    float const grad_score = inside ? p * (grad_p + delta) : 0.f;
    if (lane == 0 && inside) {
      numbers[(int64_t{work.batch} * params.heads + work.head) * params.seqlen_q + row] =
          grad_score;
    }
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      grad_k[i] += grad_score * at(q, i);
      grad_v[i] += p * at(grad_o, i);
    }
  }

  // Writes the sums over all rows that were added. All threads of the CTA call it.
  CUTE_DEVICE void write() {
    constexpr int kWarps = kThreads / 32;
    __shared__ float of_warps[kWarps][kCols];
    int const thread = int(threadIdx.x);
    bool const first_of_warp = thread % 32 < kRowThreads;
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      CUTE_UNROLL
      for (int offset = kRowThreads; offset < 32; offset *= 2) {
        grad_k[i] += __shfl_xor_sync(0xffffffffu, grad_k[i], offset);
        grad_v[i] += __shfl_xor_sync(0xffffffffu, grad_v[i], offset);
      }
      int const col = column(i / kVector) + i % kVector;
      if (first_of_warp && col < kHeadDim) {
        of_warps[thread / 32][col] = grad_k[i];
      }
      if (first_of_warp && col < kHeadDimV) {
        of_warps[thread / 32][kHeadDim + col] = grad_v[i];
      }
    }
    __syncthreads();
    if (thread < kCols) {
      float sum = 0.f;
      CUTE_UNROLL
      for (int warp = 0; warp < kWarps; ++warp) {
        sum += of_warps[warp][thread];
      }
      Base::sums(work.batch, work.head, work.m_block)[thread] = sum;
    }
  }

 private:
  CUTE_DEVICE static float at(Vector const (&vectors)[kVectors], int i) {
    return float(vectors[i / kVector][i % kVector]);
  }

  // The first column of vector `vector` of this thread.
  CUTE_DEVICE int column(int vector) const { return (vector * kRowThreads + lane) * kVector; }

  // This thread's columns of a row that has `cols` of them; zeros behind its end.
  CUTE_DEVICE void load(Vector (&vectors)[kVectors], Element const* row, int32_t cols) const {
    CUTE_UNROLL
    for (int vector = 0; vector < kVectors; ++vector) {
      if (column(vector) < cols) {
        vectors[vector] = *reinterpret_cast<Vector const*>(row + column(vector));
      } else {
        vectors[vector].clear();
      }
    }
  }
};

// In its place where a call has no leftover key.
struct NoLeftoverKey {
  template <class... Arguments>
  CUTE_DEVICE explicit NoLeftoverKey(Arguments const&...) {}
};

// What backward_finish does.
//   kThreads  of its CTAs
template <class Traits, int kThreads>
struct LeftoverKeyFinish : LeftoverKey<Traits> {
  using Base = LeftoverKey<Traits>;
  using Element = typename Base::Element;
  using Base::kCols, Base::kHeadDim, Base::numbers, Base::params;
  static_assert(kCols <= kThreads, "a thread has a column");

  // Writes dK and dV of the key, of KV head `index` counted over all sequences.
  CUTE_DEVICE void write(int32_t index) const {
    int32_t const batch = index / params.heads_kv, head_kv = index % params.heads_kv;
    int32_t const group = params.heads / params.heads_kv;
    int const thread = int(threadIdx.x);
    bool const is_key = thread < kHeadDim;
    int const col = is_key ? thread : thread - kHeadDim;
    if (thread >= kCols || col >= (is_key ? params.head_dim : params.head_dim_v)) {
      return;
    }
    float const* const first = Base::sums(batch, head_kv * group, 0) + thread;
    int32_t const tiles = group * ceil_div(params.seqlen_q, Traits::kTileM);
    float sum = 0.f;
#pragma unroll 8
    for (int32_t tile = 0; tile < tiles; ++tile) {
      sum += first[int64_t{tile} * kCols];
    }
    Element* const row = row_pointer(static_cast<Element*>(is_key ? params.grad_k : params.grad_v),
                                     is_key ? params.grad_k_stride : params.grad_v_stride, batch,
                                     head_kv, params.seqlen_k);
    row[col] = Element(sum * (is_key ? grad_qk_scale(params) : grad_v_scale(params)));
  }

  // Adds dS K to dQ, of which a thread has pairs of columns in two rows, as accumulators do.
  //   first      index in the LSE of the first row; that of the second is first + to_second
  //   col        of the thread's first pair; the next is 8 columns on
  //   rdQ        (ROWS, COLS)
  template <class GradQ>
  CUTE_DEVICE void add(WorkTile const& work, int64_t first, int to_second, int col,
                       GradQ& rdQ) const {
    using Pair = cutlass::AlignedArray<Element, 2>;
    float const grad_scores[2] = {numbers[first], numbers[first + to_second]};
    Element const* const k =
        Base::row(params.k, params.k_stride, work.batch, Base::head_kv(work.head));
    CUTE_UNROLL
    for (int i = 0; i < cute::size<1>(rdQ); i += 2) {
      Pair pair;
      pair.clear();
      if (col + 4 * i < params.head_dim) {
        pair = *reinterpret_cast<Pair const*>(k + col + 4 * i);
      }
      CUTE_UNROLL
      for (int row = 0; row < 2; ++row) {
        rdQ(row, i) += grad_scores[row] * float(pair[0]);
        rdQ(row, i + 1) += grad_scores[row] * float(pair[1]);
      }
    }
  }
};

}  // namespace cute_attention
