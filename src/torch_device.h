// torch_device.h: the devices whose tensors kernels read and write. In a build with the emulator
// (docs/emulator.md) that is the CPU, which passes for CUDA device 0.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <cstdint>

// The dispatch key of the ops.
#ifdef CUTE_ATTENTION_EMULATED
#define CUTE_ATTENTION_TORCH_DEVICE CPU
#else
#define CUTE_ATTENTION_TORCH_DEVICE CUDA

// libtorch_cuda defines it. The declaration is weak, so that this library also loads where torch
// has no CUDA.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
#endif

namespace cute_attention {

#ifdef CUTE_ATTENTION_EMULATED

inline int32_t device_type() { return aoti_torch_device_type_cpu(); }
inline int32_t device_index(AtenTensorHandle) { return 0; }
inline void* current_stream(int32_t) { return nullptr; }

#else

inline int32_t device_type() { return aoti_torch_device_type_cuda(); }

inline int32_t device_index(AtenTensorHandle tensor) {
  int32_t index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor, &index));
  return index;
}

inline void* current_stream(int32_t device) {
  STD_TORCH_CHECK(&aoti_torch_get_current_cuda_stream != nullptr,
                  "cute_attention: this torch has no CUDA");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

#endif

}  // namespace cute_attention
