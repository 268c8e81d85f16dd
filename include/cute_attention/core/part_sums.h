// core/part_sums.h: the sums of dK and dV of the parts of a block of keys (core/grad_parts.h): a
// CTA of the backward kernel writes those of its part to the workspace, and CTAs of the kernel
// after it add up the parts, always in the same order, and write dK and dV.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/address.h"
#include "cute_attention/core/grad_parts.h"
#include "cute_attention/core/keep_scale.h"
#include "cute_attention/core/load_sequence.h"

namespace cute_attention {

// What backward_finish is told of the parts. It has `ctas` CTAs more, its first ones, that add them
// up: none where nothing is divided.
struct PartSums {
  GradSchedule schedule;
  int32_t ctas;
};

//   Traits   Element, kTileM, kTileN, kHeadDim, kHeadDimV and kThreads of the backward kernel;
//            backward_finish has as many threads in a CTA as kFinishThreads says
template <class Traits, int kFinishThreads>
struct KeyGradientSums {
  using Element = typename Traits::Element;
  static constexpr int kTileM = Traits::kTileM;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  // A row of a block in the workspace: dK of a key, and behind it dV.
  static constexpr int kCols = kHeadDim + Traits::kHeadDimV;
  static constexpr int kVector = 16 / int(sizeof(Element));  // columns that a thread adds up
  static constexpr int kRowVectors = kCols / kVector;
  static constexpr int kBlockCtas = kTileN * kRowVectors / kFinishThreads;
  static_assert(kBlockCtas * kFinishThreads == kTileN * kRowVectors, "each thread has a vector");

  // The CTAs that add up the parts of the blocks of keys that are divided.
  static PartSums part_sums(GradSchedule const& schedule) {
    return {schedule, schedule.parts.count == 1 ? 0 : int32_t(schedule.divided() * kBlockCtas)};
  }

  // The sums of part `part` of a block of keys, where all blocks are divided.
  CUTE_DEVICE static float* block(BackwardParams const& params, Sequence const& sequence,
                                  GradTile const& tile, int part) {
    TileBlocks const blocks = grad_kv_blocks(params, kTileN);
    int64_t const number = part * blocks.count() +
                           blocks.first(tile.batch, tile.head_kv, sequence.row_k) + tile.n_block;
    return params.grad_kv_parts + number * (kTileN * kCols);
  }

  // The same where all or some are. Where some are, the sums of those lie one after the other in
  // the order of the schedule.
  CUTE_DEVICE static float* block(BackwardParams const& params, GradSchedule const& schedule,
                                  Sequence const& sequence, GradTile const& tile, int part) {
    if (schedule.whole == 0) {
      return block(params, sequence, tile, part);
    }
    int64_t const number = part * schedule.divided() + schedule.number(tile) - schedule.whole;
    return params.grad_kv_parts + number * (kTileN * kCols);
  }

  // Writes dK and dV of the part that a CTA has computed; those of keys past the end of the
  // sequence are left out. All threads of the MMAs call it.
  //   tdKrdK  (MMA, MMA_N, MMA_D)    tdVrdV  (MMA, MMA_N, MMA_DV)
  template <class MmaK, class MmaV, class GradK, class GradV>
  CUTE_DEVICE static void store(BackwardParams const& params, Sequence const& sequence,
                                GradTile const& tile, int thread, GradK const& tdKrdK,
                                GradV const& tdVrdV) {
    store<MmaK, MmaV>(block(params, sequence, tile, tile.part), sequence, tile, thread, tdKrdK,
                      tdVrdV);
  }
  template <class MmaK, class MmaV, class GradK, class GradV>
  CUTE_DEVICE static void store(float* target, Sequence const& sequence, GradTile const& tile,
                                int thread, GradK const& tdKrdK, GradV const& tdVrdV) {
    int const keys = sequence.seqlen_k - tile.n_block * kTileN;
    store_fragment<MmaK, kHeadDim>(target, keys, thread, tdKrdK);
    store_fragment<MmaV, Traits::kHeadDimV>(target + kHeadDim, keys, thread, tdVrdV);
  }

  // The same where one warpgroup has dK and another dV.
  template <class MmaK, class GradK>
  CUTE_DEVICE static void store_grad_k(BackwardParams const& params, Sequence const& sequence,
                                       GradTile const& tile, int thread, GradK const& tdKrdK) {
    store_fragment<MmaK, kHeadDim>(block(params, sequence, tile, tile.part),
                                   sequence.seqlen_k - tile.n_block * kTileN, thread, tdKrdK);
  }
  template <class MmaV, class GradV>
  CUTE_DEVICE static void store_grad_v(BackwardParams const& params, Sequence const& sequence,
                                       GradTile const& tile, int thread, GradV const& tdVrdV) {
    store_fragment<MmaV, Traits::kHeadDimV>(block(params, sequence, tile, tile.part) + kHeadDim,
                                            sequence.seqlen_k - tile.n_block * kTileN, thread,
                                            tdVrdV);
  }

  // Adds up the parts of the vectors of CTA `cta`, and writes them.
  CUTE_DEVICE static void add_up(BackwardParams const& params, GradSchedule const& schedule,
                                 int32_t cta) {
    GradTile const tile = schedule.block(schedule.whole + cta / kBlockCtas);
    Sequence const sequence = load_sequence(params, tile.batch);
    int const vector = cta % kBlockCtas * kFinishThreads + int(threadIdx.x);
    int const row = vector / kRowVectors, col = vector % kRowVectors * kVector;
    int const key = tile.n_block * kTileN + row;
    if (key >= sequence.seqlen_k) {
      return;
    }
    int32_t const tiles = m_tiles(sequence, tile.n_block * kTileN, kTileN, kTileM).count();
    int32_t const with_steps = parts_with_steps(tiles, schedule.parts);
    float const* source = block(params, schedule, sequence, tile, 0) + row * kCols + col;
    int64_t const distance =
        (schedule.whole > 0 ? schedule.divided() : grad_kv_blocks(params, kTileN).count()) *
        (kTileN * kCols);
    float sum[kVector] = {};
#pragma unroll 4
    for (int part = 0; part < with_steps; ++part) {
      CUTE_UNROLL
      for (int i = 0; i < kVector; i += 4) {
        float4 const four = *reinterpret_cast<float4 const*>(source + i);
        sum[i] += four.x;
        sum[i + 1] += four.y;
        sum[i + 2] += four.z;
        sum[i + 3] += four.w;
      }
      source += distance;
    }
    write(params, sequence, tile, key, col, sum);
  }

 private:
  // Writes a fragment to columns of a block.
  //   target    the first of these columns in the first row
  //   fragment  (MMA, MMA_N, MMA_COLS)
  template <class Mma, int kFragmentCols, class Fragment>
  CUTE_DEVICE static void store_fragment(float* target, int keys, int thread,
                                         Fragment const& fragment) {
    using namespace cute;
    using Shape = Shape<Int<kTileN>, Int<kFragmentCols>>;
    Tensor gC = make_tensor(make_gmem_ptr(target),  // (N, COLS)
                            Layout<Shape, Stride<Int<kCols>, _1>>{});
    auto const thread_mma = Mma{}.get_slice(thread);
    Tensor tCgC = thread_mma.partition_C(gC);                             // (MMA, MMA_N, MMA_COLS)
    Tensor tCcC = thread_mma.partition_C(make_identity_tensor(Shape{}));  // (MMA, MMA_N, MMA_COLS)
    CUTE_STATIC_ASSERT_V(size(tCgC) == size(fragment));
    Tensor gRows = make_tensor(tCgC.data(), rows_and_columns(tCgC.layout()));  // (ROWS, COLS)
    Tensor cRows = make_tensor(tCcC.data(), rows_and_columns(tCcC.layout()));  // (ROWS, COLS)
    Tensor rRows =                                                             // (ROWS, COLS)
        make_tensor(fragment.data(), rows_and_columns(fragment.layout()));
    CUTE_UNROLL
    for (int row = 0; row < size<0>(rRows); ++row) {
      if (get<0>(cRows(row, 0)) < keys) {
        CUTE_UNROLL
        for (int col = 0; col < size<1>(rRows); col += 2) {  // a thread has pairs of columns
          *reinterpret_cast<float2*>(&gRows(row, col)) =
              make_float2(rRows(row, col), rRows(row, col + 1));
        }
      }
    }
  }

  // Writes kVector columns of dK or of dV of a key, scaled.
  CUTE_DEVICE static void write(BackwardParams const& params, Sequence const& sequence,
                                GradTile const& tile, int key, int col,
                                float const (&sum)[kVector]) {
    bool const is_key = col < kHeadDim;
    int const first = is_key ? col : col - kHeadDim;
    if (first >= (is_key ? params.head_dim : params.head_dim_v)) {
      return;
    }
    Element* const row = row_pointer(static_cast<Element*>(is_key ? params.grad_k : params.grad_v),
                                     is_key ? params.grad_k_stride : params.grad_v_stride,
                                     tile.batch, tile.head_kv, sequence.row_k + key);
    float const factor = is_key ? grad_qk_scale(params) : grad_v_scale(params);
    uint32_t words[kVector / 2];
    CUTE_UNROLL
    for (int i = 0; i < kVector / 2; ++i) {
      words[i] = pack<Element>(sum[2 * i] * factor, sum[2 * i + 1] * factor);
    }
    *reinterpret_cast<uint4*>(row + first) = uint4{words[0], words[1], words[2], words[3]};
  }
};

}  // namespace cute_attention
