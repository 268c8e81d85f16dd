// fake_kernel_library.cpp: a kernel library without CUDA, for tests of the core, which loads it and
// calls it like a real one. The environment variables FAKE_CAPABILITY and FAKE_SHARED_MEMORY say
// what its two devices are. A launch computes nothing: it writes what it was called with to `lse`,
// or in a backward pass to `delta`.
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "cute_attention/kernel_library.h"

#ifndef FAKE_ABI
#define FAKE_ABI kKernelLibraryAbi
#endif
#ifndef FAKE_VERSION
#define FAKE_VERSION CUTE_ATTENTION_VERSION
#endif
#ifndef FAKE_SUFFIX
#define FAKE_SUFFIX ""
#endif

namespace cute_attention {
namespace {

constexpr int32_t kFailingHeadDim = 8;
constexpr int32_t kFakeError = 7;
int32_t current_device = 0;

int32_t from_environment(char const* name, int32_t fallback) {
  char const* const text = std::getenv(name);
  return text == nullptr ? fallback : std::atoi(text);
}

template <class Params>
int32_t launch(int32_t row, Params const& params, float* written, LaunchContext const* context) {
  if (params.head_dim == kFailingHeadDim) return kFakeError;
  written[0] = static_cast<float>(row);
  written[1] = static_cast<float>(current_device);
  written[2] = static_cast<float>(context->device->ordinal);
  std::memcpy(written + 3, &context->stream, sizeof(context->stream));
  written[5] = static_cast<float>(params.seqlen_q);
  if constexpr (std::is_same_v<Params, ForwardParams>) {
    written[6] = static_cast<float>(params.num_splits);
  }
  return 0;
}

template <int32_t kRow>
int32_t launch_row(void const* params, LaunchContext const* context) {
  auto const& forward = *static_cast<ForwardParams const*>(params);
  return launch(kRow, forward, forward.lse, context);
}

template <int32_t kRow>
int32_t launch_backward_row(void const* params, LaunchContext const* context) {
  auto const& backward = *static_cast<BackwardParams const*>(params);
  return launch(kRow, backward, backward.delta, context);
}

template <int32_t kRow>
void workspace(BackwardParams const* params, DeviceInfo const* device, BackwardWorkspace* sizes) {
  *sizes = {kRow, params->seqlen_q, params->total_q, device->ordinal};
}

// One tile of 64 queries for each head.
ForwardGrid grid(ForwardParams const* params) {
  return {(params->seqlen_q + 63) / 64 * int64_t(params->heads) * params->batch, 64};
}

KernelKey key(Arch arch, DType dtype, int32_t head_dim, uint32_t mods,
              Direction direction = Direction::Forward, uint32_t more_features = 0) {
  return {arch, direction, dtype, head_dim, head_dim, mods, mods | more_features};
}

constexpr int32_t kSmall = 48 * 1024;
constexpr int32_t kLarge = 72 * 1024;

KernelRow const kRows[] = {
    {"fake_sm80_d64_small" FAKE_SUFFIX,
     key(Arch::Sm80, DType::Float16, 64, score_mods::None, Direction::Forward, kCache),
     {64, 64, 1, 4},
     128,
     kSmall,
     nullptr,
     &launch_row<0>,
     &grid},
    {"fake_sm80_d64_large" FAKE_SUFFIX,
     key(Arch::Sm80, DType::Float16, 64, score_mods::None, Direction::Forward, kCache),
     {128, 128, 1, 4},
     128,
     kLarge,
     nullptr,
     &launch_row<1>},
    {"fake_sm80_d128" FAKE_SUFFIX,
     key(Arch::Sm80, DType::Float16, 128, score_mods::None, Direction::Forward, kSink | kCache),
     {128, 64, 1, 4},
     128,
     kLarge,
     nullptr,
     &launch_row<2>},
    {"fake_sm80_d128_softcap" FAKE_SUFFIX,
     key(Arch::Sm80, DType::Float16, 128, score_mods::Softcap, Direction::Forward,
         kSink | kDropout),
     {128, 64, 1, 4},
     128,
     kLarge,
     nullptr,
     &launch_row<3>},
    {"fake_sm90_d64" FAKE_SUFFIX,
     key(Arch::Sm90, DType::Float16, 64, score_mods::None),
     {128, 128, 2, 12},
     384,
     kLarge,
     nullptr,
     &launch_row<4>},
    {"fake_sm80_bwd_d64_small" FAKE_SUFFIX,
     key(Arch::Sm80, DType::Float16, 64, score_mods::None, Direction::Backward),
     {32, 64, 1, 4},
     128,
     kSmall,
     &workspace<5>,
     &launch_backward_row<5>},
    {"fake_sm80_bwd_d64" FAKE_SUFFIX,
     key(Arch::Sm80, DType::Float16, 64, score_mods::None, Direction::Backward),
     {64, 128, 1, 8},
     256,
     kLarge,
     &workspace<6>,
     &launch_backward_row<6>},
    {"fake_sm90_d64_cache" FAKE_SUFFIX,
     key(Arch::Sm90, DType::Float16, 64, score_mods::None, Direction::Forward, kCache),
     {128, 128, 2, 12},
     384,
     kLarge,
     nullptr,
     &launch_row<7>,
     &grid},
};

int32_t device_count() { return 2; }

int32_t device_info(int32_t ordinal, DeviceInfo* out) {
  *out = {ordinal,    from_environment("FAKE_CAPABILITY", 80),
          108,        from_environment("FAKE_SHARED_MEMORY", 163 * 1024),
          164 * 1024, 40 << 20,
          "fake GPU"};
  return 0;
}

int32_t set_device(int32_t ordinal, int32_t* previous) {
  *previous = current_device;
  current_device = ordinal;
  return 0;
}

char const* error_string(int32_t error) { return error == kFakeError ? "fake failure" : "unknown"; }

// Writes what it was called with to `used`.
int32_t append(AppendParams const* params, DType dtype, void* stream) {
  if (params->head_dim == kFailingHeadDim) return kFakeError;
  params->used[0] = params->seqlen_new;
  params->used[1] = current_device;
  params->used[2] = int32_t(dtype);
  std::memcpy(params->used + 4, &stream, sizeof(stream));
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) KernelLibrary const*
CUTE_ATTENTION_KERNEL_LIBRARY_ENTRY() {
  static KernelLibrary const library{FAKE_ABI,    FAKE_VERSION,  "fake",        "g++",
                                     8,           kRows,         &device_count, &device_info,
                                     &set_device, &error_string, &append};
  return &library;
}

// Lets a test ask which device is current for this library.
extern "C" __attribute__((visibility("default"))) int32_t fake_current_device() {
  return current_device;
}

}  // namespace cute_attention
