// sm90/fetched_code.h: brings the code of a kernel to L2 before its warps need it.
//
// Between two calls for one layer of a model the weights of others pass through L2, so that a step
// of decoding finds its code in memory, as it does keys and values. But it comes piece by piece,
// where a warp gets to it, and each piece takes as long as a read of memory.
#pragma once

#include <cstdint>

#include <cute/config.hpp>

namespace cute_attention::sm90 {

// So many bytes are fetched of each kernel that fetches its code: no kernel is shorter, which `make
// audit` checks.
constexpr int32_t kFetchedCode = 96 * 1024;

// The bytes that each of `ctas` CTAs fetches, whole cache lines.
constexpr int32_t code_share(int32_t ctas) {
  constexpr int32_t kLine = 128;
  return int32_t((int64_t{kFetchedCode / kLine} + ctas - 1) / ctas) * kLine;
}

// Starts to fetch the CTA's share of a kernel's code. Called by one thread. PTX ISA,
// "cp.async.bulk.prefetch".
CUTE_DEVICE void fetch_code(void const* kernel, int32_t share) {
  int32_t const begin = int32_t(blockIdx.x) * share;
  int32_t const bytes = kFetchedCode - begin < share ? kFetchedCode - begin : share;
  if (bytes > 0) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                     static_cast<char const*>(kernel) + begin),
                 "r"(bytes)
                 : "memory");
  }
}

}  // namespace cute_attention::sm90
