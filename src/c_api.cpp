// c_api.cpp: the functions of c_api.h: arguments checked, a row found, a kernel launched; and what
// is there, as JSON.
#include "cute_attention/c_api.h"

#include <cfloat>
#include <stdexcept>
#include <string>

#include "check_params.h"
#include "cost_model.h"
#include "dispatch.h"
#include "json.h"
#include "kernel_libraries.h"
#include "split_choice.h"

namespace cute_attention {
namespace {

// Smaller ones are 0 in the kernels, whose fp32 has no denormal numbers.
constexpr float kLeastScale = FLT_MIN;

thread_local std::string last_error;
thread_local std::string json_text;

template <class T>
T& pointee(char const* name, T* pointer) {
  if (pointer == nullptr) throw std::invalid_argument(std::string(name) + " is null");
  return *pointer;
}

void check_arch(int32_t arch) {
  if (arch != kAnyArch && arch != int32_t(Arch::Sm80) && arch != int32_t(Arch::Sm90) &&
      row_of_number(arch) == nullptr) {
    throw std::invalid_argument("arch is " + std::to_string(arch) +
                                ", expected 0 (any), 80, 90 or the number of a row");
  }
}

DeviceInfo const& device_at(int32_t ordinal) {
  std::vector<DeviceInfo> const& all = devices();
  if (ordinal < 0 || ordinal >= static_cast<int32_t>(all.size())) {
    throw std::invalid_argument("device " + std::to_string(ordinal) +
                                ": the kernel libraries see " + std::to_string(all.size()) +
                                " devices");
  }
  return all[ordinal];
}

// Makes a device current for the CUDA runtime of one kernel library, and the previous one again at
// the end.
class DeviceScope {
 public:
  DeviceScope(KernelLibrary const& library, int32_t device) : library_(library), device_(device) {
    int32_t const error = library.set_device(device, &previous_);
    if (error != 0)
      throw std::runtime_error(std::string("set_device: ") + library.error_string(error));
  }
  ~DeviceScope() {
    if (previous_ != device_) library_.set_device(previous_, &device_);
  }
  DeviceScope(DeviceScope const&) = delete;
  DeviceScope& operator=(DeviceScope const&) = delete;

 private:
  KernelLibrary const& library_;
  int32_t device_;
  int32_t previous_ = 0;
};

constexpr int32_t is_batch_invariant(ForwardParams const& p) { return p.batch_invariant; }
constexpr int32_t is_batch_invariant(BackwardParams const&) { return 0; }

template <class Params>
LoadedRow const& row_for(Direction direction, Params const& p, DType dtype, int32_t arch,
                         DeviceInfo const& device) {
  Problem problem{direction,
                  dtype,
                  p.batch,
                  p.seqlen_q,
                  p.seqlen_k,
                  p.heads,
                  p.heads_kv,
                  p.head_dim,
                  p.head_dim_v,
                  p.window_left,
                  p.window_right,
                  p.softcap,
                  (p.scale >= kLeastScale ? 0u : uint32_t(kNonPositiveScale)) |
                      (p.sink == nullptr ? 0u : uint32_t(kSink)) |
                      (p.bias.data == nullptr ? 0u : uint32_t(kBias)) |
                      (p.alibi_slopes.data == nullptr ? 0u : uint32_t(kAlibi)) |
                      (p.dropout.seed == nullptr ? 0u : uint32_t(kDropout)) |
                      (has_cache(p) ? uint32_t(kCache) : 0u) | (has_qv(p) ? uint32_t(kQv) : 0u),
                  arch >= kFirstRow ? arch : kAnyRow};
  problem.batch_invariant = is_batch_invariant(p);
  return find_row(problem, arch >= kFirstRow ? kAnyArch : arch, device);
}

void check_launch(KernelLibrary const& library, char const* name, int32_t error) {
  if (error != 0) {
    throw std::runtime_error(std::string(name) + ": " + library.error_string(error) +
                             " (CUDA error " + std::to_string(error) + ")");
  }
}

void launch(LoadedRow const& found, void const* params, DeviceInfo const& device, void* stream) {
  DeviceScope const scope(*found.library, device.ordinal);
  LaunchContext const context{&device, stream};
  check_launch(*found.library, found.row->name, found.row->launch(params, &context));
}

// The library of the row that is asked for, or one of a family of kernels: sm80 if it may be any,
// since that runs on every GPU.
KernelLibrary const& library_of(int32_t arch) {
  LoadedRow const* const asked = row_of_number(arch);
  if (asked != nullptr) return *asked->library;
  for (Arch const family : {Arch::Sm80, Arch::Sm90}) {
    for (LoadedRow const& loaded : kernel_libraries().rows) {
      bool const fits = arch == kAnyArch || arch == int32_t(family);
      if (fits && loaded.row->key.arch == family) return *loaded.library;
    }
  }
  throw std::runtime_error("no kernel library of arch " + std::to_string(arch) + " is loaded");
}

void append(AppendParams const& p, DType dtype, int32_t arch, int32_t device, void* stream) {
  check_append(p);
  check_arch(arch);
  if (p.batch == 0) return;
  KernelLibrary const& library = library_of(arch);
  DeviceScope const scope(library, device_at(device).ordinal);
  check_launch(library, "append", library.append(&p, dtype, stream));
}

// Packed rows after the last sequence are written too, where all sequences are empty as well: a
// grid for sequences of one row has CTAs to write them.
template <class Params>
Params with_a_grid(Params const& p) {
  Params launched = p;
  if (p.cu_seqlens_q != nullptr && p.seqlen_q == 0) launched.seqlen_q = 1;
  return launched;
}

void forward(ForwardParams const& p, DType dtype, int32_t arch, int32_t device, void* stream) {
  check_shape(p);
  check_arch(arch);
  if (rows_q(p) == 0 || p.heads == 0) return;
  check_tensors(p);
  DeviceInfo const& info = device_at(device);
  ForwardParams launched = with_a_grid(p);
  LoadedRow const& found = row_for(Direction::Forward, launched, dtype, arch, info);
  launched.num_splits =
      p.split_workspace == nullptr ? 1 : choose_splits(*found.row, launched, info);
  launch(found, &launched, info, stream);
}

ForwardWorkspace forward_workspace(ForwardParams const& p, DType dtype, int32_t arch,
                                   int32_t device) {
  check_shape(p);
  check_arch(arch);
  DeviceInfo const& info = device_at(device);
  bool const nothing = rows_q(p) == 0 || rows_k(p) == 0 || p.heads == 0;
  if (nothing) return {0, 1};
  ForwardParams const launched = with_a_grid(p);
  if (!may_choose_splits(launched, info) && !has_cache(p)) return {0, 1};
  KernelRow const& row = *row_for(Direction::Forward, launched, dtype, arch, info).row;
  int32_t const splits = choose_splits(row, launched, info);
  return {splits > 1 ? split_workspace_size(launched, splits) : 0, splits};
}

BackwardWorkspace workspace_of(KernelRow const& row, BackwardParams const& p,
                               DeviceInfo const& device) {
  BackwardWorkspace sizes{};
  row.workspace(&p, &device, &sizes);
  return sizes;
}

BackwardWorkspace backward_workspace(BackwardParams const& p, DType dtype, int32_t arch,
                                     int32_t device) {
  check_shape(p);
  check_arch(arch);
  DeviceInfo const& info = device_at(device);
  BackwardParams const launched = with_a_grid(p);
  KernelRow const& row = *row_for(Direction::Backward, launched, dtype, arch, info).row;
  return workspace_of(row, launched, info);
}

void backward(BackwardParams const& p, DType dtype, int32_t arch, int32_t device, void* stream) {
  check_shape(p);
  check_arch(arch);
  if (p.heads == 0 || (rows_q(p) == 0 && rows_k(p) == 0)) return;
  check_tensors(p);
  DeviceInfo const& info = device_at(device);
  BackwardParams const launched = with_a_grid(p);
  LoadedRow const& found = row_for(Direction::Backward, launched, dtype, arch, info);
  if (p.delta == nullptr || p.grad_q_sum == nullptr) {
    check_workspaces(p, workspace_of(*found.row, launched, info));
  }
  launch(found, &launched, info, stream);
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

Json row_json(LoadedRow const& loaded) {
  KernelRow const& row = *loaded.row;
  return Json::object()
      .set("name", row.name)
      .set("arch", arch_name(row.key.arch))
      .set("direction", direction_name(row.key.direction))
      .set("dtype", dtype_name(row.key.dtype))
      .set("head_dim", row.key.head_dim)
      .set("head_dim_v", row.key.head_dim_v)
      .set("score_mods", json_array(score_mod_names(row.key.score_mods)))
      .set("tile_m", row.config.tile_m)
      .set("tile_n", row.config.tile_n)
      .set("stages", row.config.stages)
      .set("warps", row.config.warps)
      .set("threads", row.threads)
      .set("shared_memory_bytes", row.shared_memory_bytes)
      .set("features", json_array(feature_names(row.key.features)))
      .set("on_request", loaded.on_request);
}

// The call of a forward problem, as far as the choice of its splits reads it: of pointers it asks
// only whether there is one.
ForwardParams params_of(Problem const& p) {
  static int32_t const kNumber = 0;
  static uint64_t const kSeed = 0;
  ForwardParams params{};
  params.batch = p.batch;
  params.seqlen_q = p.seqlen_q;
  params.seqlen_k = p.seqlen_k;
  params.heads = p.heads;
  params.heads_kv = p.heads_kv;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.window_left = p.window_left;
  params.window_right = p.window_right;
  params.dropout.seed = (p.features & kDropout) != 0 ? &kSeed : nullptr;
  params.cache.seqused_k = (p.features & kCache) != 0 ? &kNumber : nullptr;
  if (p.total_q != kNotPacked) {
    params.cu_seqlens_q = &kNumber;
    params.total_q = p.total_q;
  }
  params.num_splits = p.num_splits;
  params.batch_invariant = p.batch_invariant;
  return params;
}

// The number of splits with which the candidate runs the problem; 1 where it does not serve it.
int32_t splits_of(Candidate const& candidate, Problem const& p, DeviceInfo const* device) {
  if (device == nullptr || !candidate.reasons.empty() || p.direction != Direction::Forward) {
    return 1;
  }
  return choose_splits(*candidate.row->row, with_a_grid(params_of(p)), *device);
}

Json candidate_json(Candidate const& candidate, int32_t num_splits) {
  return Json::object()
      .set("name", candidate.row->row->name)
      .set("backend", arch_name(candidate.row->row->key.arch))
      .set("chosen", candidate.chosen)
      .set("estimate_us", candidate.estimate_us)
      .set("num_splits", num_splits)
      .set("on_request", candidate.row->on_request)
      .set("reasons", json_array(candidate.reasons));
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

char const* cute_attention_build_json() {
  return guarded_json([] {
    return Json::object()
        .set("version", CUTE_ATTENTION_VERSION)
        .set("kernel_abi", static_cast<int32_t>(kKernelLibraryAbi))
        .set("compiler", __VERSION__);
  });
}

char const* cute_attention_libraries_json() {
  return guarded_json([] {
    Json libraries = Json::array();
    for (LoadedLibrary const& library : kernel_libraries().libraries) {
      bool const loaded = library.table != nullptr;
      libraries.add(Json::object()
                        .set("path", library.path)
                        .set("name", loaded ? library.table->name : "")
                        .set("build", loaded ? library.table->build : "")
                        .set("rows", loaded ? library.table->row_count : 0)
                        .set("error", library.error));
    }
    return libraries;
  });
}

char const* cute_attention_kernels_json() {
  return guarded_json([] {
    Json rows = Json::array();
    for (LoadedRow const& loaded : kernel_libraries().rows) rows.add(row_json(loaded));
    return rows;
  });
}

char const* cute_attention_devices_json() {
  return guarded_json([] {
    Json found = Json::array();
    for (DeviceInfo const& device : devices()) {
      found.add(
          Json::object()
              .set("ordinal", device.ordinal)
              .set("name", device.name)
              .set("compute_capability", device.compute_capability)
              .set("multiprocessors", device.multiprocessors)
              .set("shared_memory_per_block", device.shared_memory_per_block)
              .set("shared_memory_per_multiprocessor", device.shared_memory_per_multiprocessor)
              .set("l2_bytes", device.l2_bytes));
    }
    return found;
  });
}

char const* cute_attention_explain_json(Problem const* problem, int32_t device) {
  return guarded_json([&] {
    DeviceInfo const* const info = device == kNoDevice ? nullptr : &device_at(device);
    Json found = Json::array();
    for (Candidate const& candidate : candidates(pointee("problem", problem), info)) {
      found.add(candidate_json(candidate, splits_of(candidate, *problem, info)));
    }
    return found;
  });
}
