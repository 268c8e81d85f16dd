// core/backward_prepare.h: the kernel that runs before the backward kernel: delta, the LSE in base
// 2, and the starting values of all that the backward adds to or leaves out.
//
// Each CTA has one tile of queries of one head. A packed sequence may be longer than
// params.seqlen_q, for which the grid was made with m_blocks CTAs for each head. Then each CTA also
// prepares every m_blocks-th tile after its own, so that no tile is left out.
#pragma once

#include <cutlass/array.h>

#include <cute/config.hpp>

#include "cute_attention/core/address.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/leftover_key.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/core/work_tile.h"

namespace cute_attention {

// Fills rows [first, last) of `heads` heads of a packed gradient. Each warp fills its share of
// them.
//   gradient  [total, heads, cols]
template <class Element>
CUTE_DEVICE void fill_rows(Element* gradient, Strides const& stride, int64_t first, int64_t last,
                           int heads, int cols, GridWarp const& warp, uint32_t filling) {
  for (int64_t row = first + warp.index; row < last; row += warp.count) {
    Element* const of_first_head = row_pointer(gradient, stride, 0, 0, row);
    for (int head = 0; head < heads; ++head) {
      fill_row(of_first_head + head * stride.head, cols, filling);
    }
  }
}

// Writes what the backward kernel starts from:
//
//   delta = (dLSE - rowsum(dO * O)) / keep_scale(), and LSE * log2(e)
//   zeros for the sums of dQ and for the counters of their turns
//   zeros for the gradients of packed rows that belong to no sequence
//   NaN for all gradients that would need keys for which the backward kernel's grid has no CTA
//
//   Traits   Element, kTileM, kTileN, kHeadDim, kHeadDimV and kThreads of the backward kernel, and
//            start_states(sum_states, block, thread, written), of sm90/backward_launch.h;
//            kPaddedNumbers: whether delta and the LSE are padded (core/grad_tile.h); kHasSums:
//            whether it keeps sums of dQ. The kernels that keep none have a CTA for every
//            key and every query. kLeavesKey: whether the call has a leftover key
//   sum_states   the states of sums whose first number is stored (sm90/backward_states.h), or
//                nullptr where sums begin at zeros
//   leftover     the workspace of the leftover key (core/leftover_key.h), or nullptr
template <class Traits>
struct BackwardPrepare {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = Traits::kThreads;
  static constexpr bool kPadded = Traits::kPaddedNumbers;
  static constexpr int kRowThreads = 8;  // neighbouring threads that share a row and load 128 bytes
  static constexpr int kVector = 16 / int(sizeof(Element));  // elements of one load
  using Vector = cutlass::AlignedArray<Element, kVector>;
  static constexpr int kVectors = ceil_div(Traits::kHeadDimV, kRowThreads* kVector);  // of a row
  static constexpr int kRows = kThreads / kRowThreads;  // that the CTA has at once
  // How many of these a thread loads together: as many as registers hold. One after the other,
  // each would wait for memory anew.
  static constexpr int kMostVectors = Traits::kLeavesKey ? 2 : 8;
  static constexpr int kMostRounds = kVectors > kMostVectors ? 1 : kMostVectors / kVectors;
  static constexpr int kRounds = min_of(ceil_div(kTileM, kRows), kMostRounds);
  static_assert(kTileM % (kRounds * kRows) == 0 && kRounds <= kRowThreads, "rows of a tile");

  using OfLeftoverKey = LeftoverKeyOfTile<Traits, kThreads, kRowThreads, kVectors>;

  CUTE_DEVICE static void run(BackwardParams const& params, WorkTile const& work,
                              int32_t* sum_states = nullptr, float* leftover = nullptr) {
    Sequence const sequence = load_sequence(params, work.batch);
    // How many keys have a CTA of the backward kernel: all keys, unless the sequence is longer than
    // params.seqlen_k, for which that grid was made.
    int const keys = Traits::kHasSums ? ceil_div(params.seqlen_k, kTileN) * kTileN : kMaxSeqlen;
    int const m_blocks = ceil_div(params.seqlen_q, kTileM);
    for (int m_block = work.m_block; m_block * kTileM < sequence.seqlen_q; m_block += m_blocks) {
      prepare_queries(params, work, sequence, m_block * kTileM, leftover, [&] {
        // Keys without a CTA add nothing to dQ, so dQ is wrong where there are such keys: NaN.
        if constexpr (Traits::kHasSums) {
          start_sums(params, sum_states,
                     first_grad_q_block(params, sequence, work.batch, work.head, kTileM) + m_block,
                     keys < sequence.seqlen_k);
        }
      });
    }
    // What packed calls alone need comes last: so the code of others is in one piece, which is
    // fetched from memory sooner.
    if (params.cu_seqlens_q == nullptr) {
      return;
    }
    if (kPadded && params.grad_sink != nullptr && work.m_block == 0) {
      fill_numbers_between(params, work, sequence);
    }
    if (keys < sequence.seqlen_k) {
      mark_keys_without_tile(params, work, sequence, keys);
    }
    clear_unused_rows(params);
  }

  // Writes delta and LSE * log2(e) of a tile of queries. All loads of kRounds rows of a thread are
  // under way together, and meanwhile the thread does what else there is to do, by meanwhile().
  template <class Meanwhile>
  CUTE_DEVICE static void prepare_queries(BackwardParams const& params, WorkTile const& work,
                                          Sequence const& sequence, int m_begin, float* leftover,
                                          Meanwhile const& meanwhile) {
    int const lane = int(threadIdx.x % kRowThreads);
    int const first_row = m_begin + int(threadIdx.x / kRowThreads);
    int const rows = sequence.seqlen_q - first_row;  // from the thread's first row on
    // Where `head` is opaque the place is computed at each use, and no register keeps it.
    auto const place_of_lse = [&](int head) {
      return lse_index(params, sequence, work.batch, head, first_row);
    };
    constexpr bool kKeepsPlace = !(Traits::kLeavesKey && kHeadDim > 96);  // fp16 would spill
    int64_t const kept_place = place_of_lse(work.head);
    // Past the end of the sequence a thread loads its last row, or of its own rows the first.
    int64_t const row = sequence.row_q + (rows > 0 ? first_row : sequence.seqlen_q - 1);
    auto const* const o = row_pointer(static_cast<Element const*>(params.o), params.o_stride,
                                      work.batch, work.head, row);
    auto const* const grad_o = row_pointer(static_cast<Element const*>(params.grad_o),
                                           params.grad_o_stride, work.batch, work.head, row);
    std::conditional_t<Traits::kLeavesKey, OfLeftoverKey, NoLeftoverKey> key(params, leftover, work,
                                                                             lane);
#pragma unroll(Traits::kLeavesKey ? 1 : kTileM)
    for (int begin = 0; begin < kTileM; begin += kRounds * kRows) {
      Vector a[kRounds][kVectors], b[kRounds][kVectors], q[kRounds][kVectors];
      CUTE_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        int const after = begin + round * kRows;
        int64_t const of_o = after < rows ? after * params.o_stride.row : 0;
        int64_t const of_grad_o = after < rows ? after * params.grad_o_stride.row : 0;
        CUTE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          int const col = column(params, lane, v);
          a[round][v] = *reinterpret_cast<Vector const*>(o + of_o + col);
          b[round][v] = *reinterpret_cast<Vector const*>(grad_o + of_grad_o + col);
        }
        if constexpr (Traits::kLeavesKey) {
          key.load_query(q[round], first_row + after);
        }
      }
      // The threads of a row divide its rounds: thread n has the row of round n.
      int const own = begin + lane * kRows;
      bool const inside = lane < kRounds && own < rows;
      int64_t const first = kKeepsPlace ? kept_place : place_of_lse(opaque(work.head));
      // A query past the end, whose numbers are loaded with the tile, sees no key.
      float const lse = inside ? params.lse[first + own] : -INFINITY;
      float const grad_lse =
          inside && params.grad_lse != nullptr ? params.grad_lse[first + own] : 0.f;
      if (begin == 0) {
        meanwhile();
      }
      float sum = 0.f;
      CUTE_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        float const of_round = sum_of_row(params, lane, a[round], b[round]);
        sum = lane == round ? of_round : sum;
      }
      Numbers const numbers = numbers_of_query(params, lse, grad_lse - sum);
      if (kPadded ? lane < kRounds : inside) {
        float* const delta = params.delta + number_index<kPadded>(params, sequence, work.batch,
                                                                  opaque(work.head), first_row);
        delta[own] = numbers.delta;
        delta[numbers_size<kPadded>(params) + own] = numbers.lse_log2;
      }
      if constexpr (Traits::kLeavesKey) {
        CUTE_UNROLL
        for (int round = 0; round < kRounds; ++round) {
          key.add(first_row + begin + round * kRows, q[round], b[round],
                  __shfl_sync(0xffffffffu, numbers.lse_log2, round, kRowThreads),
                  __shfl_sync(0xffffffffu, numbers.delta, round, kRowThreads));
        }
      }
    }
    if constexpr (Traits::kLeavesKey) {
      key.write();
    }
  }

  struct Numbers {
    float lse_log2;  // LSE * log2(e)
    float delta;
  };

  // Those of a query; delta is `difference` / keep_scale().
  CUTE_DEVICE static Numbers numbers_of_query(BackwardParams const& params, float lse,
                                              float difference) {
    // A query that sees no key has no gradient, even where its LSE has one, and no probabilities.
    // Its LSE is stored as +infinity: exp2(-inf - inf) is 0, while exp2(-inf + inf) would be NaN.
    // An LSE that is NaN compares false and stays NaN.
    float const lse_log2 = lse * float(M_LOG2E);
    bool const sees_none = lse_log2 < kLowestLseLog2;
    return {sees_none ? INFINITY : lse_log2,
            sees_none ? 0.f : difference / keep_scale(params.dropout)};
  }

  // The first column of vector v of the thread `lane` of a row; 0 where the row ends before it.
  CUTE_DEVICE static int column(BackwardParams const& params, int lane, int v) {
    int const col = (v * kRowThreads + lane) * kVector;
    return col < params.head_dim_v ? col : 0;
  }

  // The sum of dO * O over a row, of which this thread, `lane` of its threads, has some vectors.
  CUTE_DEVICE static float sum_of_row(BackwardParams const& params, int lane,
                                      Vector const (&a)[kVectors], Vector const (&b)[kVectors]) {
    float sum = 0.f;
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float with_vector = sum;
      CUTE_UNROLL
      for (int i = 0; i < kVector; ++i) {
        with_vector += float(a[v][i]) * float(b[v][i]);
      }
      sum = (v * kRowThreads + lane) * kVector < params.head_dim_v ? with_vector : sum;
    }
    CUTE_UNROLL
    for (int offset = kRowThreads / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    return sum;
  }

  // Writes the numbers of queries that see no key from the end of the sequence's last tile to those
  // of the next sequence: the gradient of a sink is a sum over all numbers of a head.
  CUTE_DEVICE static void fill_numbers_between(BackwardParams const& params, WorkTile const& work,
                                               Sequence const& sequence) {
    int64_t const end =
        number_blocks(params).first(work.batch + 1, work.head, sequence.row_q + sequence.seqlen_q) *
        kNumberRows;
    int64_t const behind_tiles = ceil_div(sequence.seqlen_q, kTileM) * kTileM;
    for (int64_t i = number_index<kPadded>(params, sequence, work.batch, work.head, behind_tiles) +
                     threadIdx.x;
         i < end; i += kThreads) {
      params.delta[i] = 0.f;
      params.delta[numbers_size<kPadded>(params) + i] = INFINITY;
    }
  }

  // Clears the rows of all packed gradients that come after the last sequence.
  CUTE_DEVICE static void clear_unused_rows(BackwardParams const& params) {
    GridWarp const warp = grid_warp(blockIdx.x, gridDim.x, threadIdx.x, kThreads);
    int64_t const first_q = params.cu_seqlens_q[params.batch];
    int64_t const first_k = params.cu_seqlens_k[params.batch];
    fill_rows(static_cast<Element*>(params.grad_q), params.grad_q_stride, first_q, params.total_q,
              params.heads, params.head_dim, warp, kZeros);
    fill_rows(static_cast<Element*>(params.grad_k), params.grad_k_stride, first_k, params.total_k,
              params.heads_kv, params.head_dim, warp, kZeros);
    fill_rows(static_cast<Element*>(params.grad_v), params.grad_v_stride, first_k, params.total_k,
              params.heads_kv, params.head_dim_v, warp, kZeros);
  }

  // Writes NaN to dK and dV of the sequence's keys from `first` on, for which the backward kernel
  // has no CTA. Among the query heads that share a kv head, the CTAs of the first head write.
  CUTE_DEVICE static void mark_keys_without_tile(BackwardParams const& params, WorkTile const& work,
                                                 Sequence const& sequence, int first) {
    int const group = params.heads / params.heads_kv;
    if (work.head % group != 0) {
      return;
    }
    int const head_kv = work.head / group;
    GridWarp const warp = head_warp(params, work, kTileM, kThreads);
    int64_t const begin = sequence.row_k + first, end = sequence.row_k + sequence.seqlen_k;
    fill_rows(
        row_pointer(static_cast<Element*>(params.grad_k), params.grad_k_stride, 0, head_kv, 0),
        params.grad_k_stride, begin, end, 1, params.head_dim, warp, kNaNs);
    fill_rows(
        row_pointer(static_cast<Element*>(params.grad_v), params.grad_v_stride, 0, head_kv, 0),
        params.grad_v_stride, begin, end, 1, params.head_dim_v, warp, kNaNs);
  }

  // Sets the sums of dQ of a block to zeros, or to NaN if they are `wrong`, and the counter of its
  // turns to 0. Where the first who has something to add stores it there are no zeros.
  CUTE_DEVICE static void start_sums(BackwardParams const& params, int32_t* sum_states,
                                     int64_t block, bool wrong) {
    if (params.grad_q_sum == nullptr) {  // no sums are kept (core/grad_tile.h)
      return;
    }
    int const thread = int(threadIdx.x);
    auto* sums = reinterpret_cast<float4*>(params.grad_q_sum + block * (kTileM * kHeadDim));
    float const value = wrong ? NAN : 0.f;
    bool const zeros = sum_states == nullptr;
    if (zeros || wrong) {
      constexpr int kVectorsOfSums = kTileM * kHeadDim / 4;
      static_assert(kVectorsOfSums % kThreads == 0, "each thread has as many");
      CUTE_UNROLL
      for (int i = 0; i < kVectorsOfSums / kThreads; ++i) {
        sums[i * kThreads + thread] = make_float4(value, value, value, value);
      }
    }
    if (!zeros) {
      Traits::start_states(sum_states, block, thread, wrong);
    }
    if (params.grad_q_turn != nullptr && thread == 0) {
      params.grad_q_turn[block] = 0;
    }
  }
};

}  // namespace cute_attention
