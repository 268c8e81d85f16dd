// sm80/grad_bias_kernel.h: the kernel that computes the gradient of a bias, after the kernels that
// compute those of q, k and v. Rows of sm90 launch it too.
//
// One CTA computes one tile of the gradient. It visits the tiles of scores that the tile of the
// bias was added to (core/grad_bias_tiles.h), computes P and dP of each anew, and sums dS in
// registers:
//
//   cp.async   Q, K(t)  | dO, V(t)            | Q, K(t+1)            | dO, V(t+1) ...
//   MMA                 | S = Q K^T | P       | dP = dO V^T | sum dS | S ...
//
// So nothing is added in global memory: the gradient is bitwise the same in every run, and needs no
// memory beside itself. It costs two of the backward's five products again.
//
// At head dim 128 a tile of 128 x 64 scores takes 96 KB of Q, K, V and dO: 2500 clocks at the 39
// bytes a clock that the L2 cache gives a multiprocessor of an H200. Its products take 1540. WGMMA
// would wait for the same bytes, and so sm90 has no kernel of its own.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/backward_scores.h"
#include "cute_attention/core/grad_bias_tiles.h"
#include "cute_attention/core/load_sequence.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm80/copy.h"
#include "cute_attention/sm80/forward_traits.h"
#include "cute_attention/sm80/gemm.h"

namespace cute_attention::sm80 {

template <class Row>
struct GradBiasTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  using Element = ElementOf<kKey.dtype>;
  // Up to head dim 128 two CTAs have room on a multiprocessor of an H100.
  static constexpr int kTileM = kHeadDim + kHeadDimV <= 256 ? 128 : 64;
  static constexpr int kTileN = 64;
  // As in the forward, a warp has 32 queries, so that each fragment of K or V serves two MMAs.
  static constexpr int kWarpsM = kTileM / 32;
  static constexpr int kWarpsN = 2;
  static constexpr int kThreads = kWarpsM * kWarpsN * 32;
  using TiledMma = MmaOfWarps<Element, kWarpsM, kWarpsN>;

  using SmemLayoutQ = SmemTile<kTileM, kHeadDim>;
  using SmemLayoutK = SmemTile<kTileN, kHeadDim>;
  using SmemLayoutGradO = SmemTile<kTileM, kHeadDimV>;
  using SmemLayoutV = SmemTile<kTileN, kHeadDimV>;
  // The sums, in fp32, once the last tile of scores is visited. The padding keeps threads that
  // write rows apart in the banks.
  using SmemLayoutSum = cute::Layout<cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>,
                                     cute::Stride<cute::Int<kTileN + 8>, cute::_1>>;

  using CpAsync = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;
  using GmemCopyQK = GmemTiledCopy<CpAsync, Element, kHeadDim, kThreads>;
  using GmemCopyV = GmemTiledCopy<CpAsync, Element, kHeadDimV, kThreads>;
  using SmemCopyA = decltype(cute::make_tiled_copy_A(
      cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMma{}));
  using SmemCopyB = decltype(cute::make_tiled_copy_B(
      cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMma{}));
  static constexpr int kRow = kSwizzleCols<kHeadDim>;
  static constexpr int kRowV = kSwizzleCols<kHeadDimV>;
  using OperandQ = SmemOperand<SmemCopyA, SmemLayoutQ, kRow, false>;
  using OperandK = SmemOperand<SmemCopyB, SmemLayoutK, kRow, false>;
  using OperandGradO = SmemOperand<SmemCopyA, SmemLayoutGradO, kRowV, false>;
  using OperandV = SmemOperand<SmemCopyB, SmemLayoutV, kRowV, false>;

  struct Tiles {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutQ>, 128> q;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutK>, 128> k;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutGradO>, 128> grad_o;
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutV>, 128> v;
  };
  union SharedMemory {
    Tiles tiles;
    cute::array_aligned<float, cute::cosize_v<SmemLayoutSum>, 128> sum;
  };
  static_assert(sizeof(SharedMemory) <= max_shared_memory(Arch::Sm80), "shared memory of a CTA");
  // How many CTAs the registers of a multiprocessor must hold: two, if its shared memory does.
  static constexpr int kCtas =
      2 * (int(sizeof(SharedMemory)) + 1024) <= max_shared_memory(kKey.arch) + 1024 ? 2 : 1;
};

template <class Row>
struct GradBiasKernel {
  using Traits = GradBiasTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Scores = BackwardScores<Row::kKey.score_mods>;
  using Terms = typename Scores::Terms;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  using FragmentS = decltype(cute::partition_fragment_C(
      typename Traits::TiledMma{}, cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{}));
  static constexpr int kRows =
      decltype(cute::size<0>(rows_and_columns(FragmentS{}.layout())))::value;
  static_assert(Scores::kTermsInScores, "the bias is added to scores");
  static_assert(!has_dropout(Row::kKey.score_mods), "no probability is dropped");

  BackwardParams const& params;
  SharedMemory& shared;
  GradBiasTiles const blocks;
  int const thread;
  Scores const scores;
  FragmentS tdBrdB;  // (MMA, MMA_M, MMA_N): the sum of dS

  CUTE_DEVICE GradBiasKernel(BackwardParams const& params, SharedMemory& shared)
      : params(params),
        shared(shared),
        blocks(grad_bias_tiles(params, kTileM, kTileN, int64_t(blockIdx.x))),
        thread(int(threadIdx.x)),
        scores(params) {}

  CUTE_DEVICE void run() {
    cute::clear(tdBrdB);
    ScoreBlock block = blocks.first;
    Sequence sequence = load_sequence(params, block.batch);
    if (is_visible(block, sequence) || advance(block, sequence)) {
      sum_up(block, sequence);
    }
    store();
  }

 private:
  // Whether a query of the tile sees one of its keys.
  CUTE_DEVICE bool is_visible(ScoreBlock const& block, Sequence const& sequence) const {
    KvTiles const tiles = kv_tiles(sequence, block.m_block * kTileM, kTileM, kTileN);
    return tiles.begin <= block.n_block && block.n_block < tiles.end;
  }

  // Moves to the next visible tile and loads its sequence. Returns false after the last.
  CUTE_DEVICE bool advance(ScoreBlock& block, Sequence& sequence) const {
    int32_t batch = block.batch;
    while (blocks.advance(block)) {
      if (block.batch != batch) {
        batch = block.batch;
        sequence = load_sequence(params, batch);
      }
      if (is_visible(block, sequence)) {
        return true;
      }
    }
    return false;
  }

  CUTE_DEVICE void sum_up(ScoreBlock block, Sequence sequence) {
    load_scores(block, sequence);
    load_gradients(block, sequence);
    bool more = true;
    while (more) {
      ScoreBlock const now = block;
      Sequence const sequence_now = sequence;
      more = advance(block, sequence);
      float lse[kRows], delta[kRows];
      load_numbers(now, sequence_now, lse, delta);

      FragmentS tSrS;  // (MMA, MMA_M, MMA_N)
      await_first_copies();
      cute::clear(tSrS);
      multiply(typename Traits::OperandQ(shared.tiles.q.data(), thread),
               typename Traits::OperandK(shared.tiles.k.data(), thread), tSrS);
      __syncthreads();  // all threads are done with Q and K
      if (more) {
        load_scores(block, sequence);
      } else {
        cute::cp_async_fence();
      }
      take_probabilities(now, sequence_now, lse, tSrS);

      FragmentS tdPrdP;  // (MMA, MMA_M, MMA_N): dP + delta
      start_with(delta, tdPrdP);
      await_first_copies();
      multiply(typename Traits::OperandGradO(shared.tiles.grad_o.data(), thread),
               typename Traits::OperandV(shared.tiles.v.data(), thread), tdPrdP);
      __syncthreads();  // all threads are done with dO and V
      if (more) {
        load_gradients(block, sequence);
      } else {
        cute::cp_async_fence();
      }
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tdBrdB); ++i) {
        tdBrdB(i) += tSrS(i) * tdPrdP(i);
      }
    }
    cute::cp_async_wait<0>();
  }

  // Waits at a barrier until all threads' copies but those started last have landed.
  CUTE_DEVICE static void await_first_copies() {
    cute::cp_async_wait<1>();
    __syncthreads();
  }

  // C += A B^T.
  template <class OperandA, class OperandB>
  CUTE_DEVICE static void multiply(OperandA const& a, OperandB const& b, FragmentS& tCrC) {
    gemm_smem(typename Traits::TiledMma{}, a.here(), b.here(), tCrC);
  }

  // Start the copies of Q and K of a tile, or of dO and V. What lies outside becomes zeros.
  CUTE_DEVICE void load_scores(ScoreBlock const& block, Sequence const& sequence) {
    load_queries<typename Traits::GmemCopyQK, typename Traits::SmemLayoutQ>(
        params.q, params.q_stride, params.head_dim, block, sequence, shared.tiles.q);
    load_keys<typename Traits::GmemCopyQK, typename Traits::SmemLayoutK>(
        params.k, params.k_stride, params.head_dim, block, sequence, shared.tiles.k);
    cute::cp_async_fence();
  }
  CUTE_DEVICE void load_gradients(ScoreBlock const& block, Sequence const& sequence) {
    load_queries<typename Traits::GmemCopyV, typename Traits::SmemLayoutGradO>(
        params.grad_o, params.grad_o_stride, params.head_dim_v, block, sequence,
        shared.tiles.grad_o);
    load_keys<typename Traits::GmemCopyV, typename Traits::SmemLayoutV>(
        params.v, params.v_stride, params.head_dim_v, block, sequence, shared.tiles.v);
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
    load<Copy, Layout>(tensor, stride, cols, block.batch,
                       block.head / (params.heads / params.heads_kv), sequence.row_k + n_begin,
                       sequence.seqlen_k - n_begin, buffer);
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
                    rows, cols, uint32_t(thread));
  }

  // (ROWS, COLS) of an accumulator of S.
  CUTE_DEVICE static auto view(FragmentS& tSrS) {
    return cute::make_tensor(tSrS.data(), rows_and_columns(tSrS.layout()));
  }
  // The (row, column) in the tile of each number of the accumulator.
  CUTE_DEVICE auto coordinates() const {
    using namespace cute;
    Tensor tScS = typename Traits::TiledMma{}.get_slice(thread).partition_C(  // (MMA, MMA_M, MMA_N)
        make_identity_tensor(Shape<Int<kTileM>, Int<kTileN>>{}));
    return make_tensor(tScS.data(), rows_and_columns(tScS.layout()));  // (ROWS, COLS)
  }

  // The LSE, times log2(e), and delta of this thread's rows. A row past the end of the sequence
  // sees no key.
  CUTE_DEVICE void load_numbers(ScoreBlock const& block, Sequence const& sequence,
                                float (&lse)[kRows], float (&delta)[kRows]) const {
    auto const cS = coordinates();  // (ROWS, COLS)
    int64_t const first = lse_index(params, sequence, block.batch, block.head, 0);
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      int32_t const query = block.m_block * kTileM + int32_t(cute::get<0>(cS(row, 0)));
      bool const inside = query < sequence.seqlen_q;
      lse[row] = inside ? params.delta[lse_size(params) + first + query] : INFINITY;
      delta[row] = inside ? params.delta[first + query] : 0.f;
    }
  }

  // Gives each number of a tile its row's number.
  CUTE_DEVICE static void start_with(float const (&numbers)[kRows], FragmentS& fragment) {
    auto rows = view(fragment);  // (ROWS, COLS)
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(rows); ++col) {
        rows(row, col) = numbers[row];
      }
    }
  }

  // Makes scores probabilities.
  //   tSrS  (MMA, MMA_M, MMA_N)
  CUTE_DEVICE void take_probabilities(ScoreBlock const& block, Sequence const& sequence,
                                      float const (&lse)[kRows], FragmentS& tSrS) const {
    int32_t const m_begin = block.m_block * kTileM;
    QueryPacking const packing = unpacked_queries();
    auto const tile =
        make_score_tile<kTileM, kTileN>(typename Traits::TiledMma{}, thread, tSrS, sequence,
                                        packing, m_begin, block.n_block * kTileN);
    Scores::template add_terms<Element>(params, Scores::of_head(params, block.batch, block.head),
                                        tile);
    if (kv_tiles(sequence, m_begin, kTileM, kTileN).masked(block.n_block)) {
      mask_scores_by_side(tile);
    }
    auto rS = view(tSrS);  // (ROWS, COLS)
    CUTE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      scores.begin(rS(row, cute::_), scores.all_near(rS), lse[row], NoTerms{});
    }
  }

  // Sums what is left to sum of the tile, and writes it.
  CUTE_DEVICE void store() {
    using namespace cute;
    __syncthreads();  // all threads are done with the tiles, whose place the sums take
    Tensor sSum =     // (M, N)
        make_tensor(make_smem_ptr(shared.sum.data()), typename Traits::SmemLayoutSum{});
    Tensor tSum =  // (MMA, MMA_M, MMA_N)
        typename Traits::TiledMma{}.get_slice(thread).partition_C(sSum);
    CUTE_STATIC_ASSERT_V(shape(tSum) == shape(tdBrdB));
    copy(tdBrdB, tSum);
    __syncthreads();
    BiasTensor const& grad = params.grad_bias;
    bool const keeps_rows = grad.row_stride != 0, keeps_cols = grad.col_stride != 0;
    int32_t const m_begin = blocks.first.m_block * kTileM, n_begin = blocks.first.n_block * kTileN;
    int32_t const rows = keeps_rows ? min_of(kTileM, params.seqlen_q - m_begin) : 1;
    int32_t const cols = keeps_cols ? min_of(kTileN, params.seqlen_k - n_begin) : 1;
    int64_t const first = blocks.first.batch * grad.batch_stride +
                          blocks.first.head * grad.head_stride + m_begin * grad.row_stride +
                          int64_t(n_begin) * grad.col_stride;
    for (int i = thread; i < rows * kTileN; i += Traits::kThreads) {
      int32_t const row = i / kTileN, col = i % kTileN;
      if (col >= cols) {
        continue;
      }
      float sum = 0.f;
      for (int32_t m = row; m < (keeps_rows ? row + 1 : kTileM); ++m) {
        for (int32_t n = col; n < (keeps_cols ? col + 1 : kTileN); ++n) {
          sum += sSum(m, n);
        }
      }
      int64_t const index = first + row * grad.row_stride + col * grad.col_stride;
      if (grad.is_float) {
        static_cast<float*>(grad.data)[index] = sum;
      } else {
        static_cast<Element*>(grad.data)[index] = Element(sum);
      }
    }
  }
};

}  // namespace cute_attention::sm80
