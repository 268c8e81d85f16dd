// sm90/grad_bias_traits.h: every layout and MMA of the sm90 kernel for the gradient of a bias, its
// barriers and its shared memory, for one row of the table.
//
// A CTA has tiles of 128 queries and 128 or 64 keys, 64 queries for each consumer warpgroup.
// Operands come in chunks of 64 columns, which any head dim is made of: Q and then dO in one ring
// of buffers, K and then V in another.
#pragma once

#include "cute_attention/core/grad_bias_tiles.h"
#include "cute_attention/sm90/backward_traits.h"

namespace cute_attention::sm90 {

// What the kernel is given; constant over the grid.
struct GradBiasArguments {
  BackwardParams params;
  GradBiasSchedule schedule;
  int32_t works;       // runs of tiles, or parts of the visits of a tile (GradBiasWork)
  int32_t* next_work;  // how many of them CTAs have taken beside their first
  CUtensorMap map_q;   // boxes of a chunk, as the next three
  CUtensorMap map_grad_o;
  CUtensorMap map_k;
  CUtensorMap map_v;
  BiasTiles bias;        // unused where TMA cannot load the bias
  bool bias_is_aligned;  // tma_loads_bias()
};

// A tile of scores that the consumers are to compute. The load warp writes it to shared memory.
struct GradBiasVisit {
  ScoreBlock block;
  Sequence sequence;
  int32_t work;      // number of the work that it belongs to
  bool is_end;       // there are no more visits
  bool is_visible;   // a query sees a key
  bool is_masked;    // but not every query every key
  bool ends_work;    // it is the last of a sum
  bool new_queries;  // it has other queries than the visit before
  // The next visit needs others: their buffers are free.
  bool ends_queries;
  bool ends_keys;
  bool ends_bias;
};

// How many visits the load warp is ahead at most.
constexpr int kVisitSlots = 4;

// The buffer that is taken `count` buffers after that of `ring`. Cheap where the compiler knows
// `count`.
template <int kStages>
CUTE_HOST_DEVICE Ring<kStages> behind(Ring<kStages> ring, uint32_t count) {
  ring.stage += count % kStages;
  ring.parity ^= count / kStages % 2;
  if (ring.stage >= kStages) {
    ring.stage -= kStages;
    ring.parity ^= 1;
  }
  return ring;
}

//   kSums  whether tiles of the gradient are sums of tiles of scores
template <class Row, bool kSums>
struct GradBiasTraits {
  static constexpr KernelKey kKey = Row::kKey;
  static constexpr int kHeadDim = kKey.head_dim;
  static constexpr int kHeadDimV = kKey.head_dim_v;
  using Element = ElementOf<kKey.dtype>;
  static constexpr int kTileM = 128;
  // S, dP and their sum are 192 registers of a thread at 128 keys: beside them there are none for
  // every other feature.
  static constexpr int kTileN = serves_subsets(kKey.score_mods) ? 64 : 128;
  static constexpr TileShape kTile{kTileM, kTileN};
  static constexpr int kConsumers = kTileM / kWarpgroupM;
  static constexpr int kStoreThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kThreads = kStoreThreads + kWarpgroupThreads;
  static constexpr int kCtasOfSums = 1;  // on a multiprocessor
  using Registers = WarpgroupRegisters<kConsumers>;

  // Columns of a chunk, and how many chunks S and dP take.
  static constexpr int kChunk = 64;
  static constexpr int kChunksS = kHeadDim / kChunk;
  static constexpr int kChunksP = kHeadDimV / kChunk;
  static constexpr int kChunks = kChunksS + kChunksP;
  static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0, "whole chunks");

  // Of 12 buffers each ring gets half. Where nothing is summed queries stay, so they need all of
  // their chunks at a time. Where a ring does not hold all of them, it is filled anew for each
  // visit.
  static constexpr int kBuffers = 12;
  static constexpr int kBuffersM = kSums ? kBuffers / 2 : max_of(kBuffers / 2, kChunks);
  static constexpr int kBuffersN = kBuffers - kBuffersM;
  static constexpr bool kKeepsM = kBuffersM >= kChunks;
  static constexpr bool kKeepsN = kBuffersN >= kChunks;
  // All chunks of dP are under way before the first is released.
  static_assert(kChunksP <= kBuffersM && kChunksP <= kBuffersN, "buffers of dP");
  static_assert(kSums || kKeepsM, "a run reads its queries once");

  // A chunk of S = Q K^T or dP = dO V^T: of a warpgroup, and of all (grad_bias_store.h).
  using Op = decltype(cute::GMMA::ss_op_selector<
                      Element, Element, float,
                      cute::Shape<cute::Int<kWarpgroupM>, cute::Int<kTileN>, cute::Int<kChunk>>>());
  using MmaOfWarpgroup = decltype(cute::make_tiled_mma(Op{}));
  using TiledMma = decltype(cute::make_tiled_mma(
      Op{}, cute::Layout<cute::Shape<cute::Int<kConsumers>, cute::_1, cute::_1>>{}));

  // Columns of the boxes of the maps (backward_maps.h).
  static constexpr int kBox = kBoxCols<kHeadDim>;
  static constexpr int kBoxV = kBoxCols<kHeadDimV>;
  static constexpr int kBoxColsK = kChunk;
  using SmemLayoutM = SmemTiles<Element, kTileM, kChunk, kBuffersM>;      // (M, CHUNK, BUFFER)
  using SmemLayoutN = SmemTiles<Element, kTileN, kChunk, kBuffersN>;      // (N, CHUNK, BUFFER)
  static constexpr int kBytesM = kTileM * kChunk * int(sizeof(Element));  // of a chunk of Q or dO
  static constexpr int kBytesN = kTileN * kChunk * int(sizeof(Element));  // of a chunk of K or V
  // Sums in fp32 of which columns, rows or both are added up. The padding keeps threads that write
  // rows apart in the banks.
  using SmemLayoutSum = cute::Layout<cute::Shape<cute::Int<kTileM>, cute::Int<kTileN>>,
                                     cute::Stride<cute::Int<kTileN + 8>, cute::_1>>;

  struct Chunks {
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutM>, 1024> m;  // Q and dO
    cute::array_aligned<Element, cute::cosize_v<SmemLayoutN>, 1024> n;  // K and V
  };
  struct SharedMemory : BiasBuffer<true, Element, kTileM, kTileN, 1> {
    union {
      Chunks chunks;
      cute::array_aligned<float, cute::cosize_v<SmemLayoutSum>, 128> sum;
    };
    GradBiasVisit visits[kVisitSlots];

    // Full: the load warp arrives, with the bytes to come. Empty: each consumer warp arrives when
    // it has read.
    uint64_t visit_full[kVisitSlots];   // 1 arrival
    uint64_t visit_empty[kVisitSlots];  // kConsumers * kWarpgroupWarps arrivals, as all below
    uint64_t m_full[kBuffersM];         // 1 arrival
    uint64_t m_empty[kBuffersM];
    uint64_t n_full[kBuffersN];  // 1 arrival
    uint64_t n_empty[kBuffersN];
    uint64_t bias_full;  // 1 arrival
    uint64_t bias_empty;
    uint64_t sum_written;  // chunks may lie where the sum was
  };
  static_assert(sizeof(SharedMemory) <= max_shared_memory(kKey.arch), "shared memory of a CTA");
};

}  // namespace cute_attention::sm90
