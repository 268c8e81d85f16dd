// call_counters.cu: whose the counters of core/call_counters.h are.
#include "cute_attention/core/call_counters.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace cute_attention {
namespace {

constexpr int32_t kCounters = 1 << 18;  // 1 MB
constexpr int32_t kOfStream = 512;
constexpr int32_t kLine = 32;  // counters of two calls share no 128 bytes

__device__ int32_t counters[kCounters];

// Calls take counters one after the other and keep them. A number is given on all devices.
class Owners {
 public:
  // The first of the counters, or -1. That of a stream is the same one at each call.
  int32_t of_stream(int32_t device, cudaStream_t stream) {
    auto const [found, is_new] = streams_.try_emplace({device, stream}, -1);
    if (is_new) {
      found->second = of_capture(kOfStream);
    }
    return found->second;
  }
  int32_t of_capture(int64_t count) {
    int64_t const rounded = (count + kLine - 1) / kLine * kLine;
    if (rounded > kCounters - given_) {
      return -1;
    }
    given_ += int32_t(rounded);
    return given_ - int32_t(rounded);
  }

  // Where the counters of a device are. The first call for a device may load them to it, which a
  // capture does not allow.
  int32_t* memory(int32_t device, bool capturing) {
    int32_t*& known = memory_[device];
    void* found = nullptr;
    if (known == nullptr && !capturing && cudaGetSymbolAddress(&found, counters) == cudaSuccess) {
      known = static_cast<int32_t*>(found);
    }
    return known;
  }

 private:
  std::map<std::pair<int32_t, cudaStream_t>, int32_t> streams_;
  std::map<int32_t, int32_t*> memory_;
  int32_t given_ = 0;
};

}  // namespace

int32_t* call_counters(int64_t count, int32_t device, void* stream) {
  static std::mutex mutex;
  static auto& owners = *new Owners;  // never destroyed: threads may run on
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  // This handle is another stream in each thread.
  if (count > kOfStream || cuda_stream == cudaStreamPerThread) {
    return nullptr;
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(cuda_stream, &status) != cudaSuccess) {
    cudaGetLastError();  // another stream's capture, which does not concern the launch
    return nullptr;
  }
  bool const capturing = status != cudaStreamCaptureStatusNone;
  std::lock_guard<std::mutex> const lock(mutex);
  int32_t* const memory = owners.memory(device, capturing);
  if (memory == nullptr) {
    return nullptr;
  }
  int32_t const first =
      capturing ? owners.of_capture(count) : owners.of_stream(device, cuda_stream);
  return first < 0 ? nullptr : memory + first;
}

}  // namespace cute_attention
