// sm80/forward_rows.h: which queries of which heads the rows of a tile are: where Q comes from, and
// where the results go.
#pragma once

#include "cute_attention/core/address.h"
#include "cute_attention/core/few_queries.h"
#include "cute_attention/core/sequence.h"
#include "cute_attention/core/unused_rows.h"
#include "cute_attention/core/work_tile.h"
#include "cute_attention/sm80/copy.h"
#include "cute_attention/sm80/few_queries.h"
#include "cute_attention/sm80/tile_walk.h"

namespace cute_attention::sm80 {

// Row r of a tile is query r of one head, both counted from the tile's first.
template <class Traits, bool kPacks>
struct ForwardRows {
  using Element = typename Traits::Element;
  using Params = ForwardParams;
  static constexpr int kTileM = Traits::kTileM;

  Params const& params;
  WorkTile const& work;
  Sequence const& sequence;
  int const m_begin;  // first query of the tile

  // Tile `index` of the grid.
  CUTE_DEVICE static WorkTile tile(Params const& params, int index) {
    return work_tile(params, kTileM, index);
  }
  CUTE_DEVICE static constexpr QueryPacking packing(Params const&) { return unpacked_queries(); }

  CUTE_DEVICE static void mark_queries_without_tile(Params const& params, WorkTile const& work,
                                                    int split) {
    cute_attention::mark_queries_without_tile<Element>(params, work, kTileM, Traits::kThreads,
                                                       split);
  }

  // Starts the copy of Q to shared memory.
  template <class Buffer>
  CUTE_DEVICE void load_q(Buffer& buffer, int thread) const {
    using namespace cute;
    auto gQ = head_tile<kTileM, Traits::kHeadDim>(  // (M, D)
        static_cast<Element const*>(params.q), params.q_stride, work.batch, work.head,
        sequence.row_q + m_begin);
    load_tile<true>(
        typename Traits::GmemCopyQK{}, gQ,
        make_tensor(make_smem_ptr(buffer.data()), typename Traits::SmemLayoutQ{}),  // (M, D)
        sequence.seqlen_q - m_begin, params.head_dim, thread);
    cp_async_fence();
  }

  //   sO  (M, DV)
  template <class Smem>
  CUTE_DEVICE void store_o(Smem const& sO, int thread) const {
    auto gO = head_tile<kTileM, Traits::kHeadDimV>(  // (M, DV)
        static_cast<Element*>(params.o), params.o_stride, work.batch, work.head,
        sequence.row_q + m_begin);
    store_tile(typename Traits::GmemCopyO{}, sO, gO, sequence.seqlen_q - m_begin, params.head_dim_v,
               thread);
  }

  CUTE_DEVICE int head(int) const { return work.head; }

  // Which rows are queries, and what their numbers in the LSE are.
  struct Places {
    int64_t first;
    int rows;
    CUTE_DEVICE bool inside(int row) const { return row < rows; }
    CUTE_DEVICE int64_t at(int row) const { return first + row; }
  };
  CUTE_DEVICE Places places() const {
    return {lse_index(params, sequence, work.batch, work.head, m_begin),
            sequence.seqlen_q - m_begin};
  }
};

// Row r of a tile is a query of one of the heads that read one KV head, as the packing says.
template <class Traits>
struct ForwardRows<Traits, true> {
  using Element = typename Traits::Element;
  using Params = PackedForwardParams;
  static constexpr int kTileM = Traits::kTileM;

  Params const& params;
  WorkTile const& work;  // its head is the first of the tile's
  Sequence const& sequence;
  int const m_begin;

  CUTE_DEVICE static WorkTile tile(Params const& params, int index) {
    WorkTile work = work_tile(packed_heads(params), params.packing.queries(kTileM), index);
    work.head = params.packing.first_head(work.head);
    return work;
  }
  CUTE_DEVICE static QueryPacking const& packing(Params const& params) { return params.packing; }

  // How many heads the tile holds.
  CUTE_DEVICE static int heads(Params const& params, WorkTile const& work) {
    return params.packing.heads(params.packing.index(work.head));
  }

  CUTE_DEVICE static void mark_queries_without_tile(Params const& params, WorkTile const& work,
                                                    int split) {
    if (params.cu_seqlens_q == nullptr) {
      return;
    }
    int const count = heads(params, work);
    for (int head = 0; head < count; ++head) {
      cute_attention::mark_queries_without_tile<Element>(
          params, {work.m_block, work.head + head, work.batch}, params.packing.queries(kTileM),
          Traits::kThreads, split);
    }
  }

  template <class Buffer>
  CUTE_DEVICE void load_q(Buffer& buffer, int thread) const {
    using Walk = TileWalk<typename Traits::GmemCopyQK, typename Traits::SmemLayoutQ>;
    auto const* const q = static_cast<Element const*>(params.q);
    Walk walk(q, 0, buffer.data(), thread);
    walk.load_rows(row_pointers(q, params.q_stride), params.head_dim, thread);
    if constexpr (Traits::Study::kCopies == Copies::Plain) {  // then nobody waits for groups
      cute::cp_async_wait<0>();
    }
  }

  //   sO  (M, DV)
  template <class Smem>
  CUTE_DEVICE void store_o(Smem const& sO, int thread) const {
    store_rows(typename Traits::GmemCopyO{}, sO,
               row_pointers(static_cast<Element*>(params.o), params.o_stride), params.head_dim_v,
               thread);
  }

  // The head of a row, or of the tile's first where the row has none.
  CUTE_DEVICE int head(int row) const {
    int const head = params.packing.head(row);
    return work.head + (head < heads(params, work) ? head : 0);
  }

  struct Places {
    Params const& params;
    WorkTile const& work;
    Sequence const& sequence;
    int m_begin;
    int heads;

    CUTE_DEVICE int query(int row) const { return m_begin + params.packing.query(row); }
    CUTE_DEVICE int head(int row) const { return work.head + params.packing.head(row); }
    CUTE_DEVICE bool inside(int row) const {
      return query(row) < sequence.seqlen_q && params.packing.head(row) < heads;
    }
    CUTE_DEVICE int64_t at(int row) const {
      return lse_index(params, sequence, work.batch, head(row), query(row));
    }
  };
  CUTE_DEVICE Places places() const {
    return {params, work, sequence, m_begin, heads(params, work)};
  }

 private:
  // Where each row lies in q or o; null where the row is no query.
  template <class Pointer>
  CUTE_DEVICE auto row_pointers(Pointer* tensor, Strides const& stride) const {
    return [tensor, &stride, places = places()](int row) -> Pointer* {
      return places.inside(row) ? row_pointer(tensor, stride, places.work.batch, places.head(row),
                                              places.sequence.row_q + places.query(row))
                                : nullptr;
    };
  }
};

}  // namespace cute_attention::sm80
