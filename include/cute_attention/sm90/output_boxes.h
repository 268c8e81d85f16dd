// sm90/output_boxes.h: O from registers to global memory by TMA, in boxes of a warp's 16 rows.
//
// Where threads store a tile (row_store.h), each warp computes addresses of rows and exchanges
// columns, some 200 instructions; here one lane starts a copy. Each warp stores its own rows and
// waits for no other. TMA leaves out what lies past the end of the queries, of a group of heads or
// of the columns. It does not know where a packed sequence ends and the next one begins, so that
// threads store those.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/key_splits.h"
#include "cute_attention/core/opaque.h"
#include "cute_attention/sm90/bulk_copy.h"
#include "cute_attention/sm90/forward_tile.h"
#include "cute_attention/sm90/forward_traits.h"
#include "cute_attention/sm90/row_store.h"
#include "cute_attention/sm90/tensor_map.h"
#include "cute_attention/sm90/tile_rows.h"

namespace cute_attention::sm90 {

// Decides whether O of a call is stored so, and makes its map. Where no CTA has a second tile, the
// store is what a CTA ends with, and that of its threads ends sooner.
template <class Traits>
void describe_output(ForwardArguments& arguments, int32_t ctas) {
  ForwardParams const& params = arguments.params;
  QueryPacking const& packing = arguments.packing;
  int32_t const heads = 1 << packing.shift;
  arguments.stores_boxes = false;
  if (params.cu_seqlens_q != nullptr || has_splits(params) || heads > kWarpM ||
      arguments.schedule.tiles <= ctas) {
    return;
  }
  TensorView const o{params.o,     params.batch,      params.seqlen_q,
                     params.heads, params.head_dim_v, params.o_stride};
  arguments.stores_boxes = make_tensor_map<typename Traits::Element>(
                               &arguments.map_o, o, packing.group,
                               {Traits::kBoxV, heads, packing.queries(kWarpM)}) == cudaSuccess;
}

// Waits until what this thread has stored last has been read from shared memory.
template <class Traits>
CUTE_DEVICE void await_output_boxes(int thread) {
  if (Traits::kStoresBoxes && thread % 32 == 0) {
    await_bulk_reads();
  }
}

// Stores the rows of a warp. Its threads call it together, each with its own part.
//   thread  of the warpgroup
//   tOrO    (MMA, MMA_M, MMA_DV)  normalised
//   rLse    (2)
template <class Traits, class Output, class Rows>
CUTE_DEVICE void store_output_boxes(ForwardArguments const& arguments, ForwardTile const& tile,
                                    typename Traits::SharedMemory& shared, int warpgroup,
                                    int thread, Output const& tOrO, Rows const& rLse) {
  using namespace cute;
  using Element = typename Traits::Element;
  using Boxes = TmaBoxes<kWarpgroupM, Traits::kHeadDimV, Traits::kBoxV>;
  await_output_boxes<Traits>(thread);
  __syncwarp();
  Tensor sO = in_shared<typename Traits::SmemLayoutO>(shared.o);  // (64, DV, WARPGROUP)
  auto const thread_copy = typename Traits::SmemCopyO{}.get_slice(opaque(thread));
  Tensor rO = convert<Element>(tOrO);  // (MMA, MMA_M, MMA_DV)
  copy(typename Traits::SmemCopyO{}, thread_copy.retile_S(rO),
       thread_copy.partition_D(sO(_, _, warpgroup)));
  fence_shared_memory();
  __syncwarp();
  if (thread % 32 == 0) {
    int const row = thread / 32 * kWarpM;  // of the warpgroup
    int32_t const query = tile.m_begin + arguments.packing.query(warpgroup * kWarpgroupM + row);
    Element const* const rows = shared.o.data() + warpgroup * kWarpgroupM * Traits::kHeadDimV;
    CUTE_UNROLL
    for (int box = 0; box < Boxes::kCount; ++box) {
      SM90_TMA_STORE_5D::copy(&arguments.map_o, rows + Boxes::offset(box, row), Boxes::col(box),
                              tile.head_of_group, query, tile.head_kv, tile.work.batch);
    }
    end_bulk_group();
  }
  if (arguments.params.lse != nullptr && thread % kThreadsPerRow == 0) {
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      StoreRow<Element> const target(arguments, tile,
                                     warpgroup * kWarpgroupM + row_of_thread(thread) + 8 * row);
      if (target.inside) {
        *target.lse = rLse(row);
      }
    }
  }
}

}  // namespace cute_attention::sm90
