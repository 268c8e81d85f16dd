// sm90/backward_chunks.h: a step of the backward where dK and dV of 64 keys leave no registers for
// S, dP and dQ together: at head dim 192/128 they are 160 floats of a thread. P is computed for all
// queries of the step, dP and dS for 32 of them after the other 32, and dQ of the step before at
// the beginning, when there are no scores. From left to right:
//
//   products of the tensor cores   dQ(m-1)   S(m) dP0(m)         dP1(m)       dV(m) dK(m)
//   pointwise work                           dQ(m-1)     P(m) dS0(m)   dS1(m)
//
// Meanwhile the tensor cores compute for the other warpgroup. dK reads dS from shared memory, where
// it lies for dQ. delta is added to dP and is not what its accumulators begin with: its loads would
// be between S and dP, and wait while the products of S take all that shared memory gives.
#pragma once

#include "cute_attention/sm90/backward_products.h"

namespace cute_attention::sm90 {

template <class Row, bool kWritesGradQ>
struct BackwardChunks : BackwardProducts<Row, kWritesGradQ> {
  using Products = BackwardProducts<Row, kWritesGradQ>;
  using Products::grads_before, Products::shared, Products::steps_before, Products::warpgroup;
  using Products::Products;
  using typename Products::FragmentP;
  using typename Products::FragmentQ;
  using typename Products::FragmentS;
  using typename Products::Operand;
  using typename Products::OperandP;
  using typename Products::Pointwise;
  using typename Products::Traits;

 protected:
  using Products::anew, Products::arrive, Products::await_grad_s, Products::awaited_grad_s_buffer,
      Products::hand_over_grad_q, Products::queries_of, Products::release_queries,
      Products::start_grad_k, Products::start_grad_p, Products::start_grad_q,
      Products::start_grad_v, Products::start_scores, Products::tell_of_grad_q,
      Products::write_grad_s;

  // One step. If it is not the block's first, dK of the step before is under way.
  CUTE_DEVICE void compute_step_in_chunks(BackwardWork const& work, bool first) {
    using namespace cute;
    FragmentQ tdQrdQ;  // (MMA, MMA_M, MMA_D): dQ of the step before
    FragmentS tSrS;    // (MMA, MMA_N, MMA_M): S^T, then P^T
    FragmentP tdPrdP;  // (MMA, MMA_N, MMA_M): dP^T of a chunk, then dS^T
    Operand tdVrP;     // (MMA, MMA_N, MMA_M / 16)
    await_grad_s();
    start_grad_q(tdQrdQ, this->key_stage());
    warpgroup_wait<1>();  // dK of the step before
    if (steps_before > 0) {
      release_queries();
    }
    warpgroup_wait<0>();  // dQ
    hand_over_grad_q(work, !first, tdQrdQ);
    auto const ring = queries_of(steps_before);
    Barrier::wait(&shared.query_full[ring.stage], ring.parity);
    start_scores(tSrS, ring, this->key_stage());
    start_grad_p(tdPrdP, ring, 0);
    tell_of_grad_q();     // now: its fence waits for stores, while the tensor cores have work
    warpgroup_wait<1>();  // S
    warpgroup_fence_operand(tSrS);
    Pointwise::template begin<true>(work, ring.stage, tSrS, Pointwise::lse(ring.stage), {}, tdVrP);
    uint32_t const stage_s = awaited_grad_s_buffer();
    constexpr int kChunks = Traits::kTileM / Traits::kChunkM;
    CUTE_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      warpgroup_wait<0>();  // dP
      warpgroup_fence_operand(tdPrdP);
      Pointwise::finish_chunk(ring.stage, chunk, tSrS, tdPrdP, tdVrP);
      OperandP tdPrdS;  // (MMA, MMA_N, MMA_M / 16)
      convert_into(tdPrdP, tdPrdS);
      if (chunk + 1 < kChunks) {
        start_grad_p(tdPrdP, ring, chunk + 1);
      }
      write_grad_s(tdPrdS, stage_s, chunk);
    }
    start_grad_v(tdVrP, ring);
    fence_shared_memory();  // before WGMMAs read what these lanes wrote
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads,
                                      uint32_t(NamedBarrier::kGradS) + anew(warpgroup));
    arrive(shared.grad_s_full[stage_s]);
    start_grad_k(ring);
    warpgroup_wait<1>();  // dV
    ++steps_before;
    ++grads_before;
  }
};

}  // namespace cute_attention::sm90
