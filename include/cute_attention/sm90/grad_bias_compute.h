// sm90/grad_bias_compute.h: what a consumer warpgroup of the kernel for the gradient of a bias
// does: dS of its 64 queries. In visit t, from left to right:
//
//   products of the tensor cores   S(t)   dP(t)                   S(t+1)
//   pointwise work                        P(t)    dS(t), sum
//
// While one warpgroup computes P or dS, the tensor cores work for the other. The two share nothing
// but the buffers.
#pragma once

#include <cutlass/arch/barrier.h>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/grad_bias_scores.h"
#include "cute_attention/core/grad_bias_store.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/mask.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm90/gemm.h"
#include "cute_attention/sm90/grad_bias_traits.h"
#include "cute_attention/sm90/row_numbers.h"
#include "cute_attention/sm90/row_store.h"

namespace cute_attention::sm90 {

template <class Row, bool kSums>
struct GradBiasCompute {
  using Traits = GradBiasTraits<Row, kSums>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using TiledMma = typename Traits::TiledMma;
  using Store = GradBiasStore<Traits>;
  static constexpr uint32_t kScoreMods = Row::kKey.score_mods;
  using Scores = BackwardScores<kScoreMods>;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  // Many chunks are not unrolled: the addresses of all their barriers would spill.
  static constexpr int kUnroll = Traits::kChunks > 4 ? 1 : 2;
  using FragmentS = decltype(cute::partition_fragment_C(
      TiledMma{}, cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{}));

  GradBiasArguments const& arguments;
  SharedMemory& shared;
  int const warpgroup;  // of the consumers
  int const thread;     // of the warpgroup
  Scores const scores;

  RowNumbers<kScoreMods> rows;
  FragmentS tdBrdB;  // (MMA, MMA_M, MMA_N): the sum of dS, with kSums
  // Where the queries and keys of a visit begin.
  Ring<Traits::kBuffersM> ring_m{};
  Ring<Traits::kBuffersN> ring_n{};
  Ring<1> ring_bias{};

  CUTE_DEVICE GradBiasCompute(GradBiasArguments const& arguments, SharedMemory& shared,
                              int warpgroup, int thread)
      : arguments(arguments),
        shared(shared),
        warpgroup(warpgroup),
        thread(thread),
        scores(arguments.params) {}

  CUTE_DEVICE void run() {
    cute::clear(tdBrdB);
    for (Ring<kVisitSlots> slot{};; slot.advance()) {
      Barrier::wait(&shared.visit_full[slot.stage], slot.parity);
      GradBiasVisit const& visit = shared.visits[slot.stage];
      if (visit.is_end) {
        break;
      }
      if (visit.is_visible) {
        compute(visit);
      } else if (!kSums) {
        write_zeros(visit.block);
      }
      if (kSums && visit.ends_work) {
        store_sum(visit);
        cute::clear(tdBrdB);
      }
      __syncwarp();  // all lanes have read the visit
      arrive_by_warp(shared.visit_empty[slot.stage]);
    }
  }

 private:
  CUTE_DEVICE int first_query(ScoreBlock const& block) const {
    return block.m_block * kTileM + warpgroup * kWarpgroupM;
  }
  // `thread`, as soon as `number` is computed: coordinates that come from it are not computed
  // before that, and do not hold registers meanwhile. A square has no sign (opaque.h).
  CUTE_DEVICE int thread_after(float number) const {
    return thread + int(zero_after(number * number));
  }
  // The number of this thread among all that hold a tile of the gradient.
  CUTE_DEVICE int thread_of_store() const { return warpgroup * kWarpgroupThreads + opaque(thread); }

  CUTE_DEVICE void compute(GradBiasVisit const& visit) {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    if (visit.new_queries) {
      rows.load(params, visit.sequence, visit.block.batch, visit.block.head,
                first_query(visit.block) + row_of_thread(opaque(thread)));
    }
    FragmentS tSrS;    // (MMA, MMA_M, MMA_N): S, then P, then dS
    FragmentS tdPrdP;  // (MMA, MMA_M, MMA_N)
    auto m = ring_m;
    auto n = ring_n;
    start_chunk<GMMA::ScaleOut::Zero>(m, n, tSrS);
#pragma unroll kUnroll
    for (int chunk = 1; chunk < Traits::kChunksS; ++chunk) {
      start_next(visit, m, n, tSrS);
    }
    auto const last_m = m;
    auto const last_n = n;
    m.advance();
    n.advance();
    start_chunk<GMMA::ScaleOut::Zero>(m, n, tdPrdP);
    warpgroup_wait<1>();  // S
    release(visit, last_m, last_n);
#pragma unroll kUnroll
    for (int chunk = 1; chunk < Traits::kChunksP; ++chunk) {
      m.advance();
      n.advance();
      start_chunk<GMMA::ScaleOut::One>(m, n, tdPrdP);
    }
    warpgroup_fence_operand(tSrS);
    take_probabilities(visit, tSrS);
    warpgroup_wait<0>();  // dP
    warpgroup_fence_operand(tdPrdP);
    release_all(visit);
    if (visit.ends_queries) {
      ring_m = behind(ring_m, Traits::kChunks);
    }
    if (visit.ends_keys) {
      ring_n = behind(ring_n, Traits::kChunks);
    }
    take_gradients(visit, tSrS, tdPrdP);
    if constexpr (!kSums) {
      scale(tSrS);
      Store::write(params, visit.block, thread_of_store(), tSrS);
    }
  }

  using RingM = Ring<Traits::kBuffersM>;
  using RingN = Ring<Traits::kBuffersN>;

  // Starts a chunk of S, or of dP: C = A B^T, or C += A B^T.
  //   tCrC  (MMA, MMA_M, MMA_N)
  template <cute::GMMA::ScaleOut kFirst>
  CUTE_DEVICE void start_chunk(RingM const& m, RingN const& n, FragmentS& tCrC) {
    using namespace cute;
    Barrier::wait(&shared.m_full[m.stage], m.parity);
    Barrier::wait(&shared.n_full[n.stage], n.parity);
    TiledMma const mma;
    auto const thread_mma = mma.get_slice(warpgroup * kWarpgroupThreads);
    Tensor sA = in_shared<typename Traits::SmemLayoutM>(shared.chunks.m);  // (M, CHUNK, BUFFER)
    Tensor sB = in_shared<typename Traits::SmemLayoutN>(shared.chunks.n);  // (N, CHUNK, BUFFER)
    Tensor tCrA = thread_mma.partition_fragment_A(sA);  // (MMA, MMA_M, MMA_K, BUFFER)
    Tensor tCrB = thread_mma.partition_fragment_B(sB);  // (MMA, MMA_N, MMA_K, BUFFER)
    start_gemm<kFirst>(mma, tCrA(_, _, _, m.stage), tCrB(_, _, _, n.stage), tCrC);
  }

  // Starts the chunk after that in these buffers, awaits that one, and releases it.
  CUTE_DEVICE void start_next(GradBiasVisit const& visit, RingM& m, RingN& n, FragmentS& tCrC) {
    auto const last_m = m;
    auto const last_n = n;
    m.advance();
    n.advance();
    start_chunk<cute::GMMA::ScaleOut::One>(m, n, tCrC);
    cute::warpgroup_wait<1>();
    release(visit, last_m, last_n);
  }

  // A chunk has been read. Its buffers are free, unless the next visit reads it too.
  CUTE_DEVICE void release(GradBiasVisit const& visit, RingM const& m, RingN const& n) {
    if (visit.ends_queries) {
      arrive_by_warp(shared.m_empty[m.stage]);
    }
    if (visit.ends_keys) {
      arrive_by_warp(shared.n_empty[n.stage]);
    }
  }

  // All chunks of dP have been read. Which buffers they have is computed once more: to know it
  // would hold registers during the products.
  CUTE_DEVICE void release_all(GradBiasVisit const& visit) {
    auto m = behind(RingM{opaque(ring_m.stage), 0}, Traits::kChunksS);
    auto n = behind(RingN{opaque(ring_n.stage), 0}, Traits::kChunksS);
#pragma unroll kUnroll
    for (int chunk = 0; chunk < Traits::kChunksP; ++chunk) {
      release(visit, m, n);
      m.advance();
      n.advance();
    }
  }

  // Makes scores probabilities.
  CUTE_DEVICE void take_probabilities(GradBiasVisit const& visit, FragmentS& tSrS) {
    BackwardParams const& params = arguments.params;
    QueryPacking const packing = unpacked_queries();
    auto const tile = score_tile(visit, thread, tSrS, packing);
    modify_scores<Element, 4>(
        params, scores, visit.block, tile, arguments.bias_is_aligned, [&](float unit) {
          Barrier::wait(&shared.bias_full, ring_bias.parity);
          add_bias_tile<BiasOfScores, kTileM>(arguments.bias, shared.bias_tile(0),
                                              warpgroup * kWarpgroupM, opaque(thread),
                                              bias_per_unit(params, visit.sequence, unit), tSrS);
          if (visit.ends_bias) {
            end_reads();
            arrive_by_warp(shared.bias_empty);
            ring_bias.advance();
          }
        });
    if (visit.is_masked) {
      mask_scores_by_side(score_tile(visit, thread_after(tSrS(0)), tSrS, packing));
    }
    auto rS = view(tSrS);  // (ROWS, COLS)
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(rS); ++row) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(rS); ++col) {
        rS(row, col) = scores.probability(rS(row, col), rows.lse[row], NoTerms{}, col);
      }
    }
  }

  // Makes P dS, or adds dS to the sum.
  CUTE_DEVICE void take_gradients(GradBiasVisit const& visit, FragmentS& tSrS, FragmentS& tdPrdP) {
    QueryPacking const packing = unpacked_queries();
    rows.drop(arguments.params, [&] { return score_tile(visit, thread, tSrS, packing); }, tdPrdP);
    auto rS = view(tSrS);     // (ROWS, COLS)
    auto rdP = view(tdPrdP);  // (ROWS, COLS)
    CUTE_UNROLL
    for (int row = 0; row < cute::size<0>(rS); ++row) {
      CUTE_UNROLL
      for (int col = 0; col < cute::size<1>(rS); ++col) {
        rS(row, col) *= rdP(row, col) + rows.delta[row];
      }
    }
    if (visit.block.m_block * kTileM + kTileM > visit.sequence.seqlen_q ||
        visit.block.n_block * kTileN + kTileN > visit.sequence.seqlen_k) {
      clear_missing(score_tile(visit, thread_after(tSrS(0)), tSrS, packing));
    }
    if constexpr (kSums) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(tSrS); ++i) {
        tdBrdB(i) += tSrS(i);
      }
    }
  }

  CUTE_DEVICE void write_zeros(ScoreBlock const& block) const {
    FragmentS zeros;  // (MMA, MMA_M, MMA_N)
    cute::clear(zeros);
    Store::write(arguments.params, block, thread_of_store(), zeros);
  }

  // Dropout's factor, which dS does not have yet (core/keep_scale.h).
  CUTE_DEVICE void scale(FragmentS& gradients) const {
    if constexpr (has_dropout(kScoreMods)) {
      float const factor = keep_scale(arguments.params.dropout);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(gradients); ++i) {
        gradients(i) *= factor;
      }
    }
  }

  // Writes the tile of the gradient that the visits add to, or the sum of a part of it.
  CUTE_DEVICE void store_sum(GradBiasVisit const& visit) {
    BackwardParams const& params = arguments.params;
    TileShape const shape = grad_bias_shape(params.grad_bias, Traits::kTile);
    bool const in_parts = arguments.schedule.parts > 1;
    float* const target =
        in_parts ? params.grad_bias_parts + int64_t(visit.work) * (shape.m * shape.n) : nullptr;
    scale(tdBrdB);
    if (shape.m * shape.n < kTileM * kTileN) {
      auto const synchronize = [] {
        cutlass::arch::NamedBarrier::sync(Traits::kStoreThreads, uint32_t(NamedBarrier::kSum));
      };
      synchronize();  // no MMA reads where the sum will lie
      Store::write_sums(params, visit.block, target, thread_of_store(), tdBrdB, shared.sum,
                        synchronize);
      end_reads();
      arrive_by_warp(shared.sum_written);
    } else if (in_parts) {
      Store::write_part(target, thread_of_store(), tdBrdB);
    } else {
      Store::write(params, visit.block, thread_of_store(), tdBrdB);
    }
  }

  // (ROWS, COLS) of an accumulator.
  CUTE_DEVICE static auto view(FragmentS& accumulator) {
    return cute::make_tensor(accumulator.data(), rows_and_columns(accumulator.layout()));
  }

  CUTE_DEVICE auto score_tile(GradBiasVisit const& visit, int thread, FragmentS& tSrS,
                              QueryPacking const& packing) const {
    return make_score_tile<kWarpgroupM, kTileN>(
        typename Traits::MmaOfWarpgroup{}, opaque(thread), tSrS, visit.sequence, packing,
        first_query(visit.block), visit.block.n_block * kTileN);
  }
};

}  // namespace cute_attention::sm90
