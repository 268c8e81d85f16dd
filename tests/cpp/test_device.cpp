// test_device.cpp: what a kernel library asks the CUDA runtime before a launch. The runtime is a
// stand-in: one device, and an error that a call which failed has left.
#include "device.cu"

#include "check.h"

namespace {
cudaError_t last_error = cudaSuccess;
int current_device = 0;
int set_devices = 0;  // calls of cudaSetDevice

cudaError_t failed(cudaError_t error) { return last_error = error; }
}  // namespace

extern "C" {
cudaError_t cudaGetLastError() {
  cudaError_t const error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  ++set_devices;
  if (device > 1) {
    return failed(cudaErrorInvalidDevice);
  }
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int*) { return failed(cudaErrorNoDevice); }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp*, int) { return failed(cudaErrorNoDevice); }
cudaError_t cudaGetDriverEntryPointByVersion(char const*, void**, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult*) {
  return failed(cudaErrorNotSupported);
}
char const* cudaGetErrorString(cudaError_t) { return ""; }
}

namespace cute_attention {
int32_t append_tokens(AppendParams const*, DType, void*) { return 0; }

namespace {

using testing::check_equal;

KernelLibrary const library = kernel_library("", "", nullptr, 0);

void test_a_launch_does_not_report_the_error_of_a_call_before_it() {
  int32_t previous = -1;
  check_equal(library.set_device(1, &previous), int32_t(cudaSuccess), "the device is there");
  failed(cudaErrorMemoryAllocation);
  check_equal(library.set_device(1, &previous), int32_t(cudaSuccess), "an error left by others");
  check_equal(int(last_error), int(cudaSuccess), "the error that a launch would read");
}

void test_the_device_is_made_current() {
  int32_t previous = -1;
  library.set_device(0, &previous);
  check_equal(library.set_device(1, &previous), int32_t(cudaSuccess), "another device");
  check_equal(previous, 0, "the device before");
  check_equal(current_device, 1, "the device now");
  check_equal(library.set_device(2, &previous), int32_t(cudaErrorInvalidDevice), "no such device");
}

void test_no_context() {  // the stand-in has none, as in a thread that has not used CUDA yet
  int32_t previous = -1;
  library.set_device(1, &previous);
  int const before = set_devices;
  library.set_device(1, &previous);
  check_equal(set_devices, before + 1, "a context is made although the device is current");
}

void test_no_driver_is_no_error() {
  check_equal(library.device_count(), 0, "devices");
  check_equal(int(last_error), int(cudaSuccess), "the error is forgotten");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_a_launch_does_not_report_the_error_of_a_call_before_it();
  test_the_device_is_made_current();
  test_no_context();
  test_no_driver_is_no_error();
  return testing::report();
}
