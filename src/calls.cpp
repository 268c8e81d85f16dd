#include "calls.h"

#include <cfloat>
#include <stdexcept>
#include <string>

#include "check_params.h"
#include "dispatch.h"
#include "kernel_libraries.h"
#include "split_choice.h"

namespace cute_attention {
namespace {

// Smaller ones are 0 in the kernels, whose fp32 has no denormal numbers.
constexpr float kLeastScale = FLT_MIN;

void check_arch(int32_t arch) {
  if (arch != kAnyArch && arch != int32_t(Arch::Sm80) && arch != int32_t(Arch::Sm90) &&
      row_of_number(arch) == nullptr) {
    throw std::invalid_argument("arch is " + std::to_string(arch) +
                                ", expected 0 (any), 80, 90 or the number of a row");
  }
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

// What the number of splits depends on, of which backward calls have none.
void set_split_options(Problem* problem, ForwardParams const& p) {
  if (p.cu_seqlens_q != nullptr) problem->total_q = int32_t(p.total_q);
  problem->num_splits = p.num_splits;
  problem->batch_invariant = p.batch_invariant;
}
void set_split_options(Problem*, BackwardParams const&) {}

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
  set_split_options(&problem, p);
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

BackwardWorkspace workspace_of(KernelRow const& row, BackwardParams const& p,
                               DeviceInfo const& device) {
  BackwardWorkspace sizes{};
  row.workspace(&p, &device, &sizes);
  return sizes;
}

}  // namespace

DeviceInfo const& device_at(int32_t ordinal) {
  std::vector<DeviceInfo> const& all = devices();
  if (ordinal < 0 || ordinal >= static_cast<int32_t>(all.size())) {
    throw std::invalid_argument("device " + std::to_string(ordinal) +
                                ": the kernel libraries see " + std::to_string(all.size()) +
                                " devices");
  }
  return all[ordinal];
}

void append(AppendParams const& p, DType dtype, int32_t arch, int32_t device, void* stream) {
  check_append(p);
  check_arch(arch);
  if (p.batch == 0) return;
  KernelLibrary const& library = library_of(arch);
  DeviceScope const scope(library, device_at(device).ordinal);
  check_launch(library, "append", library.append(&p, dtype, stream));
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

}  // namespace cute_attention
