// test_call_counters.cpp: which counters calls get, with a CUDA runtime that says what the test
// wants.
#include <cuda_runtime_api.h>

#include "check.h"
#include "cute_attention/core/call_counters.h"

namespace {

cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
cudaError_t symbol_error = cudaSuccess;

}  // namespace

extern "C" cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capture;
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetSymbolAddress(void** address, void const* symbol) {
  *address = const_cast<void*>(symbol);
  return symbol_error;
}
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }

// The file under test, as g++ reads it.
#undef __device__
#define __device__
#include "../../src/call_counters.cu"

namespace cute_attention {
namespace {

using testing::check;
using testing::check_equal;

void* stream(uintptr_t number) { return reinterpret_cast<void*>(16 * number); }

void test_no_memory() {
  symbol_error = cudaErrorStreamCaptureUnsupported;
  check(call_counters(1, 0, stream(1)) == nullptr, "memory that cannot be found");
  symbol_error = cudaSuccess;
  capture = cudaStreamCaptureStatusActive;
  check(call_counters(1, 0, stream(1)) == nullptr, "memory that a capture may not look for");
  capture = cudaStreamCaptureStatusNone;
}

void test_owners() {
  int32_t* const first = call_counters(3, 0, stream(1));
  check(first != nullptr, "a stream has counters");
  check(call_counters(512, 0, stream(1)) == first, "a stream has the same ones at each call");
  check(call_counters(513, 0, stream(1)) == nullptr, "more than a stream has");
  check(call_counters(1, 0, cudaStreamPerThread) == nullptr, "another stream in each thread");
  int32_t* const second = call_counters(1, 0, stream(2));
  check(second >= first + 512, "those of another stream");
  check(call_counters(1, 1, stream(1)) != first, "those of another device");
  capture = cudaStreamCaptureStatusActive;
  int32_t* const captured = call_counters(33, 0, stream(1));
  check(captured >= second + 512, "those of a captured call");
  check(call_counters(1, 0, stream(1)) >= captured + 64, "each captured call has its own lines");
  int64_t calls = 0;
  while (call_counters(512, 0, stream(1)) != nullptr) ++calls;
  check_equal(calls, (1 << 18) / 512 - 4, "captured calls until there are no counters left");
  capture = cudaStreamCaptureStatusNone;
  check(call_counters(1, 0, stream(1)) == first, "a stream keeps its own");
  check(call_counters(1, 0, stream(3)) == nullptr, "a new stream does without");
}

}  // namespace
}  // namespace cute_attention

int main() {
  cute_attention::test_no_memory();
  cute_attention::test_owners();
  return cute_attention::testing::report();
}
