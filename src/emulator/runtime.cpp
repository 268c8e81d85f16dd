// The functions of the CUDA runtime that kernel libraries call, so that their host code runs as it
// is. A launch returns when the kernel has ended. Streams, events and graphs there are none.
#include <cuda_runtime_api.h>
#include <xmmintrin.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "emulator/machine.h"
#include "emulator/tensor_map.h"

namespace cute_attention::emulator {
namespace {

// Environment variables, with what holds without them. docs/emulator.md describes them.
constexpr char const* kTiming = "CUTE_ATTENTION_EMULATOR_TIMING";
constexpr char const* kMultiprocessors = "CUTE_ATTENTION_EMULATOR_SMS";
constexpr char const* kCapability = "CUTE_ATTENTION_EMULATOR_CC";
constexpr char const* kTrace = "CUTE_ATTENTION_EMULATOR_TRACE";

std::string text_of_variable(char const* name, char const* otherwise) {
  char const* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}
int number_of_variable(char const* name, int otherwise) {
  return std::atoi(text_of_variable(name, std::to_string(otherwise).c_str()).c_str());
}

// The PTX of a compiled source file, which is read when it is first needed.
struct Program {
  std::string ptx;
  bool is_parsed = false;
  Module module;

  Module& parsed() {
    if (!is_parsed) parse(ptx, module);
    is_parsed = true;
    return module;
  }
};
struct Symbol {
  Program* program;
  std::string name;
};

// Kernels run one at a time.
std::mutex& launch_mutex() {
  static std::mutex mutex;
  return mutex;
}
std::map<void const*, Symbol>& symbols() {  // by the address that host code has
  static std::map<void const*, Symbol> all;
  return all;
}

// The PTX among the images that nvcc has embedded, which must not be compressed.
std::string ptx_of(uint8_t const* fatbin) {
  struct Header {
    uint32_t magic;
    uint16_t version, bytes;
    uint64_t images_bytes;
  } header;
  struct Image {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
  } image;
  constexpr uint16_t kPtx = 1;
  std::memcpy(&header, fatbin, sizeof(header));
  uint8_t const* const end = fatbin + header.bytes + header.images_bytes;
  for (uint8_t const* at = fatbin + header.bytes; at < end;
       at += image.header_bytes + image.bytes) {
    std::memcpy(&image, at, sizeof(image));
    auto const* text = reinterpret_cast<char const*>(at + image.header_bytes);
    if (image.kind == kPtx) return std::string(text, strnlen(text, image.bytes));
  }
  return "";
}

void set_timing(Grid& grid) {
  static uint64_t launches = 0;
  std::string const text = text_of_variable(kTiming, "prompt");
  std::string const name = text.substr(0, text.find(':'));
  if (name == "late") {
    grid.timing = Timing::kLate;
  } else if (name == "random") {
    grid.timing = Timing::kRandom;
    uint64_t const seed =
        name == text ? 0 : std::strtoull(text.c_str() + name.size() + 1, nullptr, 10);
    grid.random.seed(seed + 1000003 * ++launches);
  } else if (name != "prompt") {
    fail("%s is %s, expected prompt, late or random[:SEED]", kTiming, text.c_str());
  }
}

// Approximations of GPUs take tiny numbers for 0 (.ftz); so do kernels here.
class FlushToZero {
 public:
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
};

// What the last kernel has stored, where the next one may begin before its end.
LateStores& last_stores() {
  static LateStores stores;
  return stores;
}

cudaError_t launch(void const* function, dim3 size, dim3 block, size_t shared, void** arguments,
                   bool begins_early = false) {
  constexpr int kResidentCtas = 8;
  constexpr uint64_t kParameterAlignment = 128;
  std::lock_guard<std::mutex> const lock(launch_mutex());
  auto const symbol = symbols().find(function);
  if (symbol == symbols().end()) return cudaErrorInvalidDeviceFunction;
  auto const& kernels = symbol->second.program->parsed().kernels;
  auto const kernel = kernels.find(symbol->second.name);
  if (kernel == kernels.end()) return cudaErrorInvalidKernelImage;

  Grid grid;
  grid.kernel = kernel->second.get();
  std::vector<uint8_t> memory(grid.kernel->parameter_bytes + kParameterAlignment);
  uint64_t const misplaced = reinterpret_cast<uint64_t>(memory.data()) % kParameterAlignment;
  grid.parameters = memory.data() + (kParameterAlignment - misplaced) % kParameterAlignment;
  for (size_t i = 0; i < grid.kernel->parameters.size(); ++i) {
    Parameter const& parameter = grid.kernel->parameters[i];
    std::memcpy(grid.parameters + parameter.offset, arguments[i], parameter.bytes);
  }
  uint32_t const sizes[] = {size.x, size.y, size.z}, blocks[] = {block.x, block.y, block.z};
  std::copy_n(sizes, 3, grid.size);
  std::copy_n(blocks, 3, grid.block);
  grid.dynamic_shared_bytes = static_cast<uint32_t>(shared);
  grid.multiprocessors = number_of_variable(kMultiprocessors, 4);
  set_timing(grid);
  if (number_of_variable(kTrace, 0) != 0) {
    std::fprintf(stderr, "emulator: %u x %u x %u CTAs of %u threads: %s\n", size.x, size.y, size.z,
                 block.x, grid.kernel->name.c_str());
  }
  FlushToZero const flush_to_zero;
  grid.begins_early = begins_early;
  run_behind(grid, kResidentCtas, last_stores());
  return cudaSuccess;
}

// Host code makes tensor maps when a call begins. What the last kernel of the call before has
// written may have been read since, and its memory freed: nothing of it is taken back. A kernel
// that has not begun early itself may be of this call, one of two launches that host code asks for.
template <class... Arguments>
int encode_for_a_call(Arguments... arguments) {
  std::lock_guard<std::mutex> const lock(launch_mutex());
  if (last_stores().of_early_kernel) last_stores().stores.clear();
  return encode_tensor_map(arguments...);
}
template <class... Arguments>
void* pointer_to(int (*)(Arguments...)) {
  return reinterpret_cast<void*>(&encode_for_a_call<Arguments...>);
}

// Between <<< >>> and the launch, nvcc's code keeps its arguments here.
struct CallConfiguration {
  dim3 size, block;
  size_t shared;
  void* stream;
};
thread_local CallConfiguration call_configuration;

}  // namespace
}  // namespace cute_attention::emulator

using namespace cute_attention::emulator;

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    uint8_t const* fatbin;
  };
  auto* const program = new Program;  // for as long as the process lives
  program->ptx = ptx_of(static_cast<Wrapper*>(wrapper)->fatbin);
  return reinterpret_cast<void**>(program);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** program, char const* function, char*, char const* name, int,
                            void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> const lock(launch_mutex());
  symbols()[function] = {reinterpret_cast<Program*>(program), name};
}
void __cudaRegisterVar(void** program, char* variable, char*, char const* name, int, size_t, int,
                       int) {
  std::lock_guard<std::mutex> const lock(launch_mutex());
  symbols()[variable] = {reinterpret_cast<Program*>(program), name};
}
unsigned __cudaPushCallConfiguration(dim3 size, dim3 block, size_t shared, void* stream) {
  call_configuration = {size, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* size, dim3* block, size_t* shared, void* stream) {
  *size = call_configuration.size;
  *block = call_configuration.block;
  *shared = call_configuration.shared;
  *static_cast<void**>(stream) = call_configuration.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void** kernel, void const* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void* kernel, dim3 size, dim3 block, void** arguments, size_t shared,
                               void*) {
  return launch(kernel, size, block, shared, arguments);
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function,
                                void** arguments) {
  bool begins_early = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    begins_early |= config->attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
                    config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
  }
  return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, arguments,
                begins_early);
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  std::lock_guard<std::mutex> const lock(launch_mutex());
  last_stores().stores.clear();  // it waits for that kernel, and the next kernel for it
  std::memset(data, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return "an error of the emulator"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// As an H200 or an A100, but for the number of multiprocessors, and L2 in proportion: so each CTA
// of a persistent kernel has several tiles, and heads fall into several groups, even in a small
// test.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  int const capability = number_of_variable(kCapability, 90);
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(properties->name, sizeof(properties->name), "emulated GPU");
  properties->major = capability / 10;
  properties->minor = capability % 10;
  properties->multiProcessorCount = number_of_variable(kMultiprocessors, 4);
  properties->sharedMemPerBlockOptin = capability == 90 ? 232448 : 166912;
  properties->sharedMemPerMultiprocessor = capability == 90 ? 233472 : 167936;
  properties->l2CacheSize = properties->multiProcessorCount * (384 << 10);
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** address, void const* variable) {
  std::lock_guard<std::mutex> const lock(launch_mutex());
  auto const symbol = symbols().find(variable);
  if (symbol == symbols().end()) return cudaErrorInvalidSymbol;
  auto const& variables = symbol->second.program->parsed().variables;
  auto const found = variables.find(symbol->second.name);
  if (found == variables.end()) return cudaErrorInvalidSymbol;
  *address = found->second;
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  bool const is_known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = is_known ? pointer_to(&encode_tensor_map) : nullptr;
  *result = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return is_known ? cudaSuccess : cudaErrorInvalidValue;
}

}  // extern "C"
