// sm80/grad_bias_kernel.h: the kernel that computes the gradient of a bias, after the kernels that
// compute those of q, k and v. Rows of sm90 launch it too.
//
// A CTA visits tiles of scores (core/grad_bias_tiles.h) and computes P and dP of each anew. What is
// left of dS is a tile of the gradient, or is summed in registers over the visits. One visit, from
// left to right in time:
//
//   cp.async |           | K(t+1), Q(t+1)      |               | V(t+1), dO(t+1), bias(t+1) |
//   MMA      | S = Q K^T | barrier | P = exp2  | dP = dO V^T   | barrier | dS               |
//
// The next tile has other queries or other keys; what it shares with this one stays where it is.
// So where nothing is summed, a CTA reads Q and dO once and then walks along the keys.
//
// Nothing is added in global memory, and the gradient is bitwise the same in every run. It costs
// two of the backward's five products again.
//
// At head dim 128 a visit of 128 x 64 scores takes these clocks of a multiprocessor of an H200:
// 1540 for the products with mma.sync, 2050 for the ldmatrix of their operands, and 1200 at the 39
// bytes a clock that the L2 cache gives, for K, V and the bias; 2900 where Q and dO are read as
// well. WGMMA would save some of the ldmatrix alone.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/grad_bias_store.h"
#include "cute_attention/core/grad_bias_walk.h"
#include "cute_attention/core/grad_tile.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm80/bias_tile.h"
#include "cute_attention/sm80/copy.h"
#include "cute_attention/sm80/gemm.h"
#include "cute_attention/sm80/grad_bias_scores.h"
#include "cute_attention/sm80/grad_bias_traits.h"

namespace cute_attention::sm80 {

//   kSums  whether tiles of the gradient are sums of tiles of scores
template <class Traits, bool kSums>
struct GradBiasKernel : GradBiasScores<Traits> {
  using Numbers = GradBiasScores<Traits>;
  using typename Numbers::Bias;
  using typename Numbers::Element;
  using typename Numbers::FragmentS;
  using typename Numbers::SharedMemory;
  using Store = GradBiasStore<Traits>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr uint32_t kScoreMods = Traits::kKey.score_mods;
  static constexpr bool kPadded = Traits::kKey.arch == Arch::Sm90;  // small heads of rows of sm90

  using Walk = GradBiasWalk<kTileM, kTileN, kSums>;
  using Visit = typename Walk::Visit;
  using Changes = typename Walk::Changes;

  using Numbers::params;
  using Numbers::shared;
  using Numbers::thread;
  Walk const steps;

  CUTE_DEVICE GradBiasKernel(BackwardParams const& params, GradBiasSchedule const& schedule,
                             SharedMemory& shared)
      : Numbers(params, shared), steps{params, schedule} {}

  CUTE_DEVICE void run() {
    GradBiasWork const work = steps.work(int64_t(blockIdx.x));
    Visit visit{work.first, work.count};
    if (visit.left > 0 && (is_visible(visit.block) || advance(visit))) {
      walk(visit);
    } else if (kSums) {
      FragmentS zeros;  // (MMA, MMA_M, MMA_N)
      cute::clear(zeros);
      store_sum(work.first, zeros);
    }
  }

 private:
  // Whether the tile is visible. If not, and if it is a tile of the gradient, writes zeros there.
  CUTE_DEVICE bool is_visible(ScoreBlock const& block) const {
    bool const visible = steps.is_visible(block);
    if (!kSums && !visible) {
      FragmentS zeros;  // (MMA, MMA_M, MMA_N)
      cute::clear(zeros);
      Store::write(params, block, opaque(thread), zeros);
    }
    return visible;
  }

  // Moves to the next visible tile. Returns false after the last.
  CUTE_DEVICE bool advance(Visit& visit) const {
    while (steps.move(visit)) {
      if (is_visible(Walk::here(visit.block))) {
        return true;
      }
    }
    return false;
  }

  CUTE_DEVICE void walk(Visit visit) {
    FragmentS tdBrdB;  // (MMA, MMA_M, MMA_N): the sum of dS, with kSums
    cute::clear(tdBrdB);
    load_scores(visit.block, {true, true});
    load_gradients(visit.block, {true, true});
    cute::cp_async_wait<1>();
    __syncthreads();  // Q and K are there
    bool more = true;
    while (more) {
      ScoreBlock const now = visit.block;
      more = advance(visit);
      Changes const next = steps.changes(now, visit.block);

      FragmentS tSrS;  // (MMA, MMA_M, MMA_N)
      cute::clear(tSrS);
      multiply(typename Traits::OperandQ(shared.tiles.q.data(), opaque(thread)),
               typename Traits::OperandK(shared.tiles.k.data(), opaque(thread)), tSrS);
      await_copies();  // the rest of this tile is there; all threads are done with Q and K
      if (more) {
        load_scores(Walk::here(visit.block), next);
      }
      Numbers::take_probabilities(Walk::here(now), tSrS);

      FragmentS tdPrdP;  // (MMA, MMA_M, MMA_N): dP + delta
      Numbers::start_with(shared.tiles.delta, tdPrdP);
      multiply(typename Traits::OperandGradO(shared.tiles.grad_o.data(), opaque(thread)),
               typename Traits::OperandV(shared.tiles.v.data(), opaque(thread)), tdPrdP);
      Numbers::drop(Walk::here(now), tdPrdP);
      await_copies();       // the next Q and K are there; all threads are done with this tile
      auto& tdSrdS = tSrS;  // (MMA, MMA_M, MMA_N)
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tdSrdS); ++i) {
        tdSrdS(i) *= tdPrdP(i);
        if constexpr (kSums) {
          tdBrdB(i) += tdSrdS(i);
        }
      }
      // Now, when registers are free: the addresses of the copies would not find any before.
      if (more) {
        load_gradients(Walk::here(visit.block), next);
      }
      if constexpr (!kSums) {
        Store::write(params, Walk::here(now), opaque(thread), tdSrdS);
      }
    }
    if constexpr (kSums) {
      store_sum(visit.block, tdBrdB);
    }
  }

  // Waits at a barrier until all threads' copies have landed.
  CUTE_DEVICE static void await_copies() {
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  // C += A B^T.
  template <class OperandA, class OperandB>
  CUTE_DEVICE static void multiply(OperandA const& a, OperandB const& b, FragmentS& tCrC) {
    gemm_smem(typename Traits::TiledMma{}, a.here(), b.here(), tCrC);
  }

  // Starts the copies of Q and K of a tile. What lies outside becomes zeros.
  CUTE_DEVICE void load_scores(ScoreBlock const& block, Changes const& changed) {
    Sequence const sequence = Numbers::sequence_of(block);
    if (changed.queries) {
      load_queries<typename Traits::GmemCopyQK, typename Traits::SmemLayoutQ>(
          params.q, params.q_stride, params.head_dim, block, sequence, shared.tiles.q);
    }
    if (changed.keys) {
      load_keys<typename Traits::GmemCopyQK, typename Traits::SmemLayoutK>(
          params.k, params.k_stride, params.head_dim, block, sequence, shared.tiles.k);
    }
    cute::cp_async_fence();
  }

  // Starts the copies of dO, V, LSE and delta, and of the bias.
  CUTE_DEVICE void load_gradients(ScoreBlock const& block, Changes const& changed) {
    Sequence const sequence = Numbers::sequence_of(block);
    if (changed.queries) {
      load_queries<typename Traits::GmemCopyV, typename Traits::SmemLayoutGradO>(
          params.grad_o, params.grad_o_stride, params.head_dim_v, block, sequence,
          shared.tiles.grad_o);
      load_numbers(block, sequence);
      Numbers::write_words(block);
    }
    if (changed.keys) {
      load_keys<typename Traits::GmemCopyV, typename Traits::SmemLayoutV>(
          params.v, params.v_stride, params.head_dim_v, block, sequence, shared.tiles.v);
    }
    if (has_bias_tiles<kScoreMods>(params, sequence)) {
      Bias(shared.tiles.bias.data())
          .template load<Traits::kThreads>(bias_of_head(params, block.batch, block.head),
                                           params.bias.row_stride, sequence, block.m_block * kTileM,
                                           block.n_block * kTileN, thread);
    }
    cute::cp_async_fence();
  }
  template <class Copy, class Layout, class Buffer>
  CUTE_DEVICE void load_queries(void const* tensor, Strides const& stride, int32_t cols,
                                ScoreBlock const& block, Sequence const& sequence,
                                Buffer& buffer) const {
    int const m_begin = block.m_block * kTileM;
    load<Copy, Layout>(tensor, stride, cols, block.batch, block.head, sequence.row_q + m_begin,
                       sequence.seqlen_q - m_begin, buffer);
  }
  template <class Copy, class Layout, class Buffer>
  CUTE_DEVICE void load_keys(void const* tensor, Strides const& stride, int32_t cols,
                             ScoreBlock const& block, Sequence const& sequence,
                             Buffer& buffer) const {
    int const n_begin = block.n_block * kTileN;
    load<Copy, Layout>(tensor, stride, cols, block.batch, steps.head_kv(block),
                       sequence.row_k + n_begin, sequence.seqlen_k - n_begin, buffer);
  }
  template <class Copy, class Layout, class Buffer>
  CUTE_DEVICE void load(void const* tensor, Strides const& stride, int32_t cols, int32_t batch,
                        int32_t head, int64_t row, int32_t rows, Buffer& buffer) const {
    using namespace cute;
    constexpr int kTileRows = decltype(size<0>(Layout{}))::value;
    constexpr int kTileCols = decltype(size<1>(Layout{}))::value;
    load_tile<true>(Copy{},
                    head_tile<kTileRows, kTileCols>(static_cast<Element const*>(tensor), stride,
                                                    batch, head, row),
                    make_tensor(make_smem_ptr(buffer.data()), Layout{}),  // (ROWS, COLS)
                    rows, cols, uint32_t(opaque(thread)));
  }

  // The LSE, times log2(e), and delta of the rows of a tile. Those past the end of the sequence get
  // zeros.
  CUTE_DEVICE void load_numbers(ScoreBlock const& block, Sequence const& sequence) {
    static_assert(Traits::kThreads >= 2 * kTileM, "each thread copies one LSE or delta");
    int const row = thread % kTileM;
    if (thread < 2 * kTileM) {
      bool const is_lse = thread < kTileM;
      int32_t const query = block.m_block * kTileM + row;
      bool const inside = query < sequence.seqlen_q;
      float const* const numbers = params.delta + (is_lse ? numbers_size<kPadded>(params) : 0);
      float& target = is_lse ? shared.tiles.lse[row] : shared.tiles.delta[row];
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<float>::copy(
          numbers[number_index<kPadded>(params, sequence, block.batch, block.head,
                                        inside ? query : 0)],
          target, inside);
    }
  }

  // Writes the tile of the gradient that a visit adds to, or the sum of a part of it.
  CUTE_DEVICE void store_sum(ScoreBlock const& block, FragmentS const& sum) {
    TileShape const shape = grad_bias_shape(params.grad_bias, Traits::kTile);
    bool const in_parts = steps.schedule.parts > 1;
    float* const target =
        in_parts ? params.grad_bias_parts + int64_t(blockIdx.x) * (shape.m * shape.n) : nullptr;
    if (shape.m * shape.n < kTileM * kTileN) {
      Store::write_sums(params, block, target, thread, sum, shared.sum, [] { __syncthreads(); });
    } else if (in_parts) {
      Store::write_part(target, thread, sum);
    } else {
      Store::write(params, block, thread, sum);
    }
  }
};

}  // namespace cute_attention::sm80
