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
  using FragmentS = decltype(cute::partition_fragment_C(
      TiledMma{}, cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>{}));

  GradBiasArguments const& arguments;
  SharedMemory& shared;
  int const thread;  // of the consumers
  Scores const scores;

  RowNumbers<kScoreMods> rows;
  FragmentS tdBrdB;  // (MMA, MMA_M, MMA_N): the sum of dS, with kSums
  // Where the queries and keys of a visit begin.
  Ring<Traits::kBuffersM> ring_m{};
  Ring<Traits::kBuffersN> ring_n{};
  Ring<1> ring_bias{};

  CUTE_DEVICE GradBiasCompute(GradBiasArguments const& arguments, SharedMemory& shared, int thread)
      : arguments(arguments), shared(shared), thread(thread), scores(arguments.params) {}

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
  CUTE_DEVICE int warpgroup() const { return thread / kWarpgroupThreads; }

  CUTE_DEVICE void compute(GradBiasVisit const& visit) {
    using namespace cute;
    BackwardParams const& params = arguments.params;
    if (visit.new_queries) {
      rows.load(params, visit.sequence, visit.block.batch, visit.block.head,
                visit.block.m_block * kTileM + warpgroup() * kWarpgroupM +
                    row_of_thread(thread % kWarpgroupThreads));
    }
    FragmentS tSrS;    // (MMA, MMA_M, MMA_N): S, then P, then dS
    FragmentS tdPrdP;  // (MMA, MMA_M, MMA_N)
    CUTE_UNROLL
    for (int chunk = 0; chunk < Traits::kChunksS; ++chunk) {
      start_chunk(chunk, chunk == 0, tSrS);
      if (chunk > 0) {
        warpgroup_wait<1>();
        release_chunk(visit, chunk - 1);
      }
    }
    start_chunk(Traits::kChunksS, true, tdPrdP);
    warpgroup_wait<1>();  // S
    release_chunk(visit, Traits::kChunksS - 1);
    CUTE_UNROLL
    for (int chunk = Traits::kChunksS + 1; chunk < Traits::kChunks; ++chunk) {
      start_chunk(chunk, false, tdPrdP);
    }
    warpgroup_fence_operand(tSrS);
    take_probabilities(visit, tSrS);
    warpgroup_wait<0>();  // dP
    warpgroup_fence_operand(tdPrdP);
    CUTE_UNROLL
    for (int chunk = Traits::kChunksS; chunk < Traits::kChunks; ++chunk) {
      release_chunk(visit, chunk);
    }
    if (visit.ends_queries) {
      ring_m = behind(ring_m, Traits::kChunks);
    }
    if (visit.ends_keys) {
      ring_n = behind(ring_n, Traits::kChunks);
    }
    take_gradients(visit, tSrS, tdPrdP);
    if constexpr (!kSums) {
      scale(tSrS);
      Store::write(params, visit.block, opaque(thread), tSrS);
    }
  }

  // Starts a chunk of S, or of dP: C = A B^T, or C += A B^T.
  //   chunk  counts those of Q and dO
  //   tCrC   (MMA, MMA_M, MMA_N)
  CUTE_DEVICE void start_chunk(int chunk, bool first, FragmentS& tCrC) {
    using namespace cute;
    auto const m = behind(ring_m, chunk);
    auto const n = behind(ring_n, chunk);
    Barrier::wait(&shared.m_full[m.stage], m.parity);
    Barrier::wait(&shared.n_full[n.stage], n.parity);
    TiledMma const mma;
    auto const thread_mma = mma.get_slice(warpgroup() * kWarpgroupThreads);
    Tensor sA = in_shared<typename Traits::SmemLayoutM>(shared.chunks.m);  // (M, CHUNK, BUFFER)
    Tensor sB = in_shared<typename Traits::SmemLayoutN>(shared.chunks.n);  // (N, CHUNK, BUFFER)
    Tensor tCrA = thread_mma.partition_fragment_A(sA);  // (MMA, MMA_M, MMA_K, BUFFER)
    Tensor tCrB = thread_mma.partition_fragment_B(sB);  // (MMA, MMA_N, MMA_K, BUFFER)
    if (first) {
      start_gemm<GMMA::ScaleOut::Zero>(mma, tCrA(_, _, _, m.stage), tCrB(_, _, _, n.stage), tCrC);
    } else {
      start_gemm<GMMA::ScaleOut::One>(mma, tCrA(_, _, _, m.stage), tCrB(_, _, _, n.stage), tCrC);
    }
  }

  // A chunk has been read. Its buffers are released, unless the next visit reads it too.
  CUTE_DEVICE void release_chunk(GradBiasVisit const& visit, int chunk) {
    if (visit.ends_queries) {
      arrive_by_warp(shared.m_empty[behind(ring_m, chunk).stage]);
    }
    if (visit.ends_keys) {
      arrive_by_warp(shared.n_empty[behind(ring_n, chunk).stage]);
    }
  }

  // Makes scores probabilities.
  CUTE_DEVICE void take_probabilities(GradBiasVisit const& visit, FragmentS& tSrS) {
    BackwardParams const& params = arguments.params;
    QueryPacking const packing = unpacked_queries();
    auto const tile = score_tile(visit, tSrS, packing);
    modify_scores<Element>(
        params, scores, visit.block, tile, arguments.bias_is_aligned, [&](float unit) {
          Barrier::wait(&shared.bias_full, ring_bias.parity);
          add_bias_tile<BiasOfScores, kTileM>(arguments.bias, shared.bias_tile(0),
                                              warpgroup() * kWarpgroupM,
                                              opaque(thread % kWarpgroupThreads),
                                              bias_per_unit(params, visit.sequence, unit), tSrS);
          if (visit.ends_bias) {
            __syncwarp();  // all lanes have read the tile
            arrive_by_warp(shared.bias_empty);
            ring_bias.advance();
          }
        });
    if (visit.is_masked) {
      mask_scores_by_side(tile);
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
    auto const make_tile = [&] { return score_tile(visit, tSrS, packing); };
    rows.drop(arguments.params, make_tile, tdPrdP);
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
      clear_missing(make_tile());
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
    Store::write(arguments.params, block, opaque(thread), zeros);
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
      Store::write_sums(params, visit.block, target, opaque(thread), tdBrdB, shared.sum,
                        synchronize);
      cutlass::arch::fence_view_async_shared();  // before TMA writes where these threads read
      __syncwarp();
      arrive_by_warp(shared.sum_written);
    } else if (in_parts) {
      Store::write_part(target, opaque(thread), tdBrdB);
    } else {
      Store::write(params, visit.block, opaque(thread), tdBrdB);
    }
  }

  // (ROWS, COLS) of an accumulator.
  CUTE_DEVICE static auto view(FragmentS& accumulator) {
    return cute::make_tensor(accumulator.data(), rows_and_columns(accumulator.layout()));
  }

  CUTE_DEVICE auto score_tile(GradBiasVisit const& visit, FragmentS& tSrS,
                              QueryPacking const& packing) const {
    return make_score_tile<kTileM, kTileN>(TiledMma{}, opaque(thread), tSrS, visit.sequence,
                                           packing, visit.block.m_block * kTileM,
                                           visit.block.n_block * kTileN);
  }
};

}  // namespace cute_attention::sm90
