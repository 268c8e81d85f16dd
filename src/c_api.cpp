// c_api.cpp: the functions of c_api.h: what calls.h and reports.h do, with errors as numbers.
#include "cute_attention/c_api.h"

#include <stdexcept>
#include <string>

#include "calls.h"
#include "cost_model.h"
#include "dispatch.h"
#include "kernel_libraries.h"
#include "reports.h"

namespace cute_attention {
namespace {

thread_local std::string last_error;
thread_local std::string json_text;

template <class T>
T& pointee(char const* name, T* pointer) {
  if (pointer == nullptr) throw std::invalid_argument(std::string(name) + " is null");
  return *pointer;
}

// Runs `body` and turns what it throws into the thread's last error.
template <class Body>
int32_t guarded(Body const& body) {
  try {
    body();
    return 0;
  } catch (std::exception const& error) {
    last_error = error.what();
    return 1;
  }
}

template <class Body>
char const* guarded_json(Body const& body) {
  int32_t const error = guarded([&] { json_text = Json(body()).text(); });
  return error == 0 ? json_text.c_str() : nullptr;
}

}  // namespace
}  // namespace cute_attention

using namespace cute_attention;

int32_t cute_attention_forward(ForwardParams const* params, DType dtype, int32_t arch,
                               int32_t device, void* stream) {
  return guarded([&] { forward(pointee("params", params), dtype, arch, device, stream); });
}

int32_t cute_attention_forward_workspace(ForwardParams const* params, DType dtype, int32_t arch,
                                         int32_t device, ForwardWorkspace* workspace) {
  return guarded([&] {
    ForwardWorkspace const sizes =
        forward_workspace(pointee("params", params), dtype, arch, device);
    pointee("workspace", workspace) = sizes;
  });
}

int32_t cute_attention_append(AppendParams const* params, DType dtype, int32_t arch, int32_t device,
                              void* stream) {
  return guarded([&] { append(pointee("params", params), dtype, arch, device, stream); });
}

int32_t cute_attention_backward_workspace(BackwardParams const* params, DType dtype, int32_t arch,
                                          int32_t device, BackwardWorkspace* workspace) {
  return guarded([&] {
    BackwardWorkspace const sizes =
        backward_workspace(pointee("params", params), dtype, arch, device);
    pointee("workspace", workspace) = sizes;
  });
}

int32_t cute_attention_backward(BackwardParams const* params, DType dtype, int32_t arch,
                                int32_t device, void* stream) {
  return guarded([&] { backward(pointee("params", params), dtype, arch, device, stream); });
}

int32_t cute_attention_add_kernel_folder(char const* folder) {
  return guarded([&] { add_kernel_folder(&pointee("folder", folder)); });
}

int32_t cute_attention_load_library(char const* path, int32_t on_request) {
  return guarded([&] { load_library(&pointee("path", path), on_request != 0); });
}

int32_t cute_attention_row(char const* name) {
  int32_t number = 0;
  guarded([&] { number = row_of_name(&pointee("name", name)).number; });
  return number;
}

int32_t cute_attention_estimate(Problem const* problem, CostQuestion const* question,
                                double* microseconds) {
  return guarded([&] {
    double const found = estimate_us(pointee("question", question), pointee("problem", problem));
    pointee("microseconds", microseconds) = found;
  });
}

char const* cute_attention_last_error() { return last_error.c_str(); }

char const* cute_attention_build_json() { return guarded_json(build_report); }

char const* cute_attention_libraries_json() { return guarded_json(libraries_report); }

char const* cute_attention_kernels_json() { return guarded_json(kernels_report); }

char const* cute_attention_devices_json() { return guarded_json(devices_report); }

char const* cute_attention_explain_json(Problem const* problem, int32_t device) {
  return guarded_json([&] { return explain_report(pointee("problem", problem), device); });
}
