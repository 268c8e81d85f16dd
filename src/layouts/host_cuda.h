// host_cuda.h: declares what headers for nvcc use and g++ does not know. It must be included before
// everything else. The program calls only one of these functions, the conversion to an address in
// shared memory; only that one is defined.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1

int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
int __vimax3_s32(int, int, int);
unsigned __vimax3_u32(unsigned, unsigned, unsigned);
int __vimin3_s32(int, int, int);
template <class T>
T __hfma2(T, T, T);
template <class T>
T __shfl_sync(unsigned, T, int, int = 32);
template <class T>
T __shfl_xor_sync(unsigned, T, int, int = 32);
template <class T>
T __shfl_up_sync(unsigned, T, unsigned, int = 32);
template <class T>
T __shfl_down_sync(unsigned, T, unsigned, int = 32);
unsigned __ballot_sync(unsigned, int);
int __any_sync(unsigned, int);
int __all_sync(unsigned, int);
int __ffs(int);
int __clz(int);
int __popc(unsigned);
template <class T>
T __ldg(T const*);
void __threadfence();
void __nanosleep(unsigned);
void __syncthreads();
void __syncwarp(unsigned = 0xffffffffu);
extern uint3 const threadIdx, blockIdx;
extern dim3 const blockDim, gridDim;

namespace cute_attention::layouts {

// Stands for the shared memory of a CTA: its first byte has the address 0 in shared memory.
constexpr size_t kSharedMemoryWindow = 256 * 1024;
alignas(1024) inline unsigned char shared_memory_window[kSharedMemoryWindow];

}  // namespace cute_attention::layouts

inline size_t __cvta_generic_to_shared(void const* pointer) {
  return size_t(static_cast<unsigned char const*>(pointer) -
                cute_attention::layouts::shared_memory_window);
}
