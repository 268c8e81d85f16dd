// sm90/mla_half.h: what both consumer warpgroups of the kernel for rows with qv do: half of the
// columns of O += P V, tile of queries by tile of queries.
#pragma once

#include "cute_attention/core/accumulator.h"
#include "cute_attention/core/online_softmax.h"
#include "cute_attention/sm90/gemm.h"
#include "cute_attention/sm90/mla_traits.h"
#include "cute_attention/sm90/tile_end.h"
#include "cute_attention/sm90/tile_reader.h"

namespace cute_attention::sm90 {

// kPart is kLeft or kRight, the columns of O. `Compute` is the class that derives from it, whose
// compute() is called for each tile of queries.
template <class Row, Part kPart, class Compute>
struct MlaHalf {
  using Traits = MlaTraits<Row>;
  using Element = typename Traits::Element;
  using SharedMemory = typename Traits::SharedMemory;
  using Ring = sm90::Ring<Traits::kStages>;
  static constexpr int kTileN = Traits::kTileN;

  template <class Mma, int kCols>
  using Fragment = decltype(cute::partition_fragment_C(
      Mma{}, cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kCols>>{}));
  using FragmentS = Fragment<typename Traits::MmaQK, kTileN>;
  using FragmentO = Fragment<typename Traits::MmaPV, Traits::kHalf>;
  using FragmentP = decltype(cute::make_tensor<Element>(as_a_operand(FragmentS{}.layout())));
  using Softmax = OnlineSoftmax<2, Traits::kMostLag>;
  using Rows = typename Softmax::Rows;

  ForwardArguments const& arguments;
  SharedMemory& shared;
  int const thread;  // of the warpgroup

  FragmentO tOrO;  // (MMA, MMA_M, MMA_HALF)
  FragmentP tOrP;  // (MMA, MMA_M, MMA_N / 16)
  MlaChannel<kTileN> channel;
  Ring ring{};  // the buffer of the KV tile that is visited
  TileReader<SharedMemory> tiles;

  CUTE_DEVICE MlaHalf(ForwardArguments const& arguments, SharedMemory& shared, int thread)
      : arguments(arguments),
        shared(shared),
        thread(thread),
        channel{shared.exchange, thread},
        tiles{shared} {}

  CUTE_DEVICE void run() {
    while (true) {
      ForwardTile const& tile = tiles.wait();
      if (tile.is_end()) {
        return;
      }
      static_cast<Compute*>(this)->compute(tile);
      tiles.release(lane_of_warp() == 0);
    }
  }

 protected:
  CUTE_DEVICE void wait_for(Part part) {
    Barrier::wait(&shared.part_full[ring.stage][part], ring.parity);
  }
  // Tells the load warp that this warp's MMAs have read a part.
  CUTE_DEVICE void release(Ring const& of, Part part) {
    arrive_by_warp(shared.part_empty[of.stage][part]);
  }

  CUTE_DEVICE Element* part_of_keys(Part part) {
    return shared.kv.data() + Traits::offset_kv(int(ring.stage), part);
  }

  // Starts O += P V. P and V must be there.
  CUTE_DEVICE void start_output() {
    using namespace cute;
    typename Traits::MmaPV mma;
    Tensor sVt =  // (HALF, N, 1)
        make_tensor(make_smem_ptr(part_of_keys(kPart)), typename Traits::SmemLayoutVt{});
    CUTE_STATIC_ASSERT_V(size<0>(sVt) == Int<Traits::kHalf>{});
    CUTE_STATIC_ASSERT_V(size<1>(sVt) == Int<kTileN>{});
    Tensor tOrV = mma.get_slice(0).partition_fragment_B(sVt);  // (MMA, MMA_HALF, MMA_N, 1)
    start_gemm<GMMA::ScaleOut::One>(mma, tOrP, tOrV(_, _, _, 0), tOrO);
  }

  // The O of the tile before has ended, whose buffer was `of`.
  CUTE_DEVICE void release_output(Ring const& of) {
    cute::warpgroup_fence_operand(tOrO);
    release(of, kPart);
  }

  CUTE_DEVICE auto output() { return rows_of_output<Softmax>(tOrO); }  // (ROWS, COLS)

  // Stores this half of O; kLeft has column 0, and so stores what `end` says of the rows.
  CUTE_DEVICE void store(ForwardTile const& tile, SoftmaxEnd<Rows> const& end) {
    auto rO = output();
    end_tile<Row>(arguments, tile, 0, thread, rO, end, Traits::col(kPart));
  }
};

}  // namespace cute_attention::sm90
