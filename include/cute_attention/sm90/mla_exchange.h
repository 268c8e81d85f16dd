// sm90/mla_exchange.h: what the warpgroup that computes probabilities hands to the other one.
//
// Both multiply the same P by their columns of V, with WGMMAs of the same rows and keys. So thread
// t of one needs of P exactly the registers that thread t of the other has, and they pass through
// shared memory as they are: no layout, no bank conflict, 16 bytes of a thread at a time.
#pragma once

#include <cute/tensor.hpp>

#include "cute_attention/sm90/barrier.h"
#include "cute_attention/sm90/warpgroup.h"

namespace cute_attention::sm90 {

// The place in shared memory, which holds one message. A message of a KV tile is its P and the
// factors of O; the last one of a tile of queries has factors alone.
template <int kTileN>
struct MlaExchange {
  static constexpr int kVectors = kTileN / 16;  // of the 16-bit probabilities of a thread

  uint4 probabilities[kVectors][kWarpgroupThreads];
  float2 factors[kWarpgroupThreads];  // of the thread's two rows
  uint64_t full;                      // kWarpgroupWarps arrivals, of the sender
  uint64_t empty;                     // kWarpgroupWarps arrivals, of the receiver
};

// One warpgroup's end of it.
template <int kTileN>
struct MlaChannel {
  MlaExchange<kTileN>& exchange;
  int const thread;  // of the warpgroup
  Ring<1> ring{};

  // Waits until the receiver has read the message before. Call it before the exponentials: the
  // compiler moves nothing over a wait, and all sums and conversions would come behind the last of
  // them.
  CUTE_DEVICE void await_empty() { Barrier::wait(&exchange.empty, ring.parity ^ 1); }

  // After await_empty().
  //   tOrP     (MMA, MMA_M, MMA_N / 16)  probabilities as an operand
  //   factors  (2)
  template <class Operand, class Rows>
  CUTE_DEVICE void send(Operand const& tOrP, Rows const& factors) {
    send_after(factors, [&] {
      auto const* const vectors = vectors_of(tOrP);
      CUTE_UNROLL
      for (int i = 0; i < exchange.kVectors; ++i) {
        exchange.probabilities[i][thread] =
            uint4{vectors[4 * i], vectors[4 * i + 1], vectors[4 * i + 2], vectors[4 * i + 3]};
      }
    });
  }
  template <class Rows>
  CUTE_DEVICE void send(Rows const& factors) {
    send_after(factors, [] {});
  }

  template <class Operand, class Rows>
  CUTE_DEVICE void receive(Operand& tOrP, Rows& factors) {
    receive_after(factors, [&] {
      auto* const vectors = vectors_of(tOrP);
      CUTE_UNROLL
      for (int i = 0; i < exchange.kVectors; ++i) {
        uint4 const vector = exchange.probabilities[i][thread];
        vectors[4 * i] = vector.x;
        vectors[4 * i + 1] = vector.y;
        vectors[4 * i + 2] = vector.z;
        vectors[4 * i + 3] = vector.w;
      }
    });
  }
  template <class Rows>
  CUTE_DEVICE void receive(Rows& factors) {
    receive_after(factors, [] {});
  }

 private:
  // The registers of an operand.
  template <class Operand>
  CUTE_DEVICE static auto* vectors_of(Operand& tOrP) {
    static_assert(decltype(cute::size(tOrP))::value == 8 * MlaExchange<kTileN>::kVectors);
    using Word = std::conditional_t<std::is_const_v<Operand>, uint32_t const, uint32_t>;
    return reinterpret_cast<Word*>(tOrP.data());
  }

  template <class Rows, class Write>
  CUTE_DEVICE void send_after(Rows const& factors, Write const& write) {
    write();
    exchange.factors[thread] = float2{factors(0), factors(1)};
    __syncwarp();  // all lanes have written theirs
    arrive_by_warp(exchange.full);
    ring.advance();
  }

  template <class Rows, class Read>
  CUTE_DEVICE void receive_after(Rows& factors, Read const& read) {
    Barrier::wait(&exchange.full, ring.parity);
    read();
    float2 const both = exchange.factors[thread];
    factors(0) = both.x;
    factors(1) = both.y;
    __syncwarp();  // all lanes have read theirs
    arrive_by_warp(exchange.empty);
    ring.advance();
  }
};

}  // namespace cute_attention::sm90
