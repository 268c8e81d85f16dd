// dispatch.h: from a problem to the row that serves it, over all loaded kernel libraries.
#pragma once

#include <string>
#include <vector>

#include "cute_attention/c_api.h"
#include "kernel_libraries.h"

namespace cute_attention {

struct Candidate {
  LoadedRow const* row;
  std::vector<std::string> reasons;  // why it is refused; none where it serves
  double estimate_us;                // infinite where it is refused
  bool chosen;                       // of its architecture: the closest head dims, then the fastest
};

// Every row's answer to the problem. Without a device every row is refused.
std::vector<Candidate> candidates(Problem const& problem, DeviceInfo const* device);

// The chosen row that serves the problem, of one architecture or, of all (kAnyArch), the fastest;
// remembered by problem. Throws std::runtime_error with what was asked and why the nearest rows are
// refused.
LoadedRow const& find_row(Problem const& problem, int32_t arch, DeviceInfo const& device);

// The names of the features whose bits are set, in the order of the bits: {"bias", "softcap"}.
std::vector<std::string> feature_names(uint32_t features);

char const* arch_name(Arch arch);          // "sm80"
char const* direction_name(Direction);     // "forward"
char const* dtype_name(DType dtype);       // "fp16"
char const* score_mod_name(ScoreMod mod);  // "none"

}  // namespace cute_attention
