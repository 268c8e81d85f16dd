// test_once_per_device.cpp: what is asked of CUDA once for each device is asked for each of them,
// and again after a failure.
#include "cute_attention/once_per_device.h"

#include "check.h"

namespace cute_attention {
namespace {

using testing::check_equal;

void test_each_device_is_asked_once() {
  OncePerDevice once;
  for (int32_t device : {0, 1, 63}) {
    int calls = 0;
    for (int i = 0; i < 3; ++i) {
      auto const error = once.run(device, [&] {
        ++calls;
        return cudaSuccess;
      });
      check_equal(int(error), int(cudaSuccess), "success is returned");
    }
    check_equal(calls, 1, "calls for a device");
  }
}

void test_a_failure_is_not_remembered() {
  OncePerDevice once;
  int calls = 0;
  auto const ask = [&] {
    ++calls;
    return calls < 3 ? cudaErrorInvalidValue : cudaSuccess;
  };
  check_equal(int(once.run(5, ask)), int(cudaErrorInvalidValue), "the first failure");
  check_equal(int(once.run(5, ask)), int(cudaErrorInvalidValue), "the second failure");
  check_equal(int(once.run(5, ask)), int(cudaSuccess), "success");
  check_equal(int(once.run(5, ask)), int(cudaSuccess), "success that is remembered");
  check_equal(calls, 3, "calls until success");
}

void test_devices_without_a_bit() {
  OncePerDevice once;
  int calls = 0;
  auto const ask = [&] {
    ++calls;
    return cudaSuccess;
  };
  for (int i = 0; i < 2; ++i) {
    once.run(64, ask);
    once.run(200, ask);
  }
  check_equal(calls, 4, "calls for devices above 63");
  once.run(0, ask);
  check_equal(calls, 5, "they do not stand for device 0");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  test_each_device_is_asked_once();
  test_a_failure_is_not_remembered();
  test_devices_without_a_bit();
  return testing::report();
}
