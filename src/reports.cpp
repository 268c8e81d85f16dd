#include "reports.h"

#include "calls.h"
#include "dispatch.h"
#include "kernel_libraries.h"
#include "split_choice.h"

namespace cute_attention {
namespace {

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

// The number of splits with which the candidate runs the problem; 1 where it does not serve it.
int32_t splits_of(Candidate const& candidate, Problem const& p, DeviceInfo const* device) {
  bool const serves = device != nullptr && candidate.reasons.empty();
  return serves ? choose_splits(*candidate.row->row, p, *device) : 1;
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

Json build_report() {
  return Json::object()
      .set("version", CUTE_ATTENTION_VERSION)
      .set("kernel_abi", static_cast<int32_t>(kKernelLibraryAbi))
      .set("compiler", __VERSION__);
}

Json libraries_report() {
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
}

Json kernels_report() {
  Json rows = Json::array();
  for (LoadedRow const& loaded : kernel_libraries().rows) rows.add(row_json(loaded));
  return rows;
}

Json devices_report() {
  Json found = Json::array();
  for (DeviceInfo const& device : devices()) {
    found.add(Json::object()
                  .set("ordinal", device.ordinal)
                  .set("name", device.name)
                  .set("compute_capability", device.compute_capability)
                  .set("multiprocessors", device.multiprocessors)
                  .set("shared_memory_per_block", device.shared_memory_per_block)
                  .set("shared_memory_per_multiprocessor", device.shared_memory_per_multiprocessor)
                  .set("l2_bytes", device.l2_bytes));
  }
  return found;
}

Json explain_report(Problem const& problem, int32_t device) {
  DeviceInfo const* const info = device == kNoDevice ? nullptr : &device_at(device);
  Json found = Json::array();
  for (Candidate const& candidate : candidates(problem, info)) {
    found.add(candidate_json(candidate, splits_of(candidate, problem, info)));
  }
  return found;
}

}  // namespace cute_attention
