// dispatch.h: from a problem to the row that serves it, over all loaded kernel libraries.
#pragma once

#include <string>
#include <vector>

#include "cute_attention/c_api.h"
#include "kernel_libraries.h"

namespace cute_attention {

// A row's answer to a problem.
struct Candidate {
  LoadedRow const* row;
  std::vector<std::string> reasons;  // why the row does not serve the problem; none where it does
  double estimate_us;                // call_us() (split_choice.h); infinite where it does not serve
  bool chosen;                       // whether calls run it, of all rows of its architecture
};

// The answers of all rows. Without a device no row serves.
std::vector<Candidate> candidates(Problem const& problem, DeviceInfo const* device);

// The row that serves a call: the chosen one of `arch`, or the fastest of the chosen ones of all
// architectures (kAnyArch). Fast, and without memory of the lengths: a call whose lengths are new
// takes no longer than one made before. Where the problem asks for a row, that one, whatever `arch`
// is. Throws std::runtime_error where no row serves, with what was asked and why the nearest rows
// refuse it.
LoadedRow const& find_row(Problem const& problem, int32_t arch, DeviceInfo const& device);

// The loaded row of a number, or null where there is none; and that of a name, which throws
// std::invalid_argument where there is none.
LoadedRow const* row_of_number(int32_t number);
LoadedRow const& row_of_name(std::string const& name);

// The names of the features whose bits are set, in the order of the bits: {"bias", "softcap"}.
std::vector<std::string> feature_names(uint32_t features);

// The names of the modifiers of a set, in the order in which kernels apply them: {"softcap"}.
std::vector<std::string> score_mod_names(uint32_t score_mods);

char const* arch_name(Arch arch);       // "sm80"
char const* direction_name(Direction);  // "forward"
char const* dtype_name(DType dtype);    // "fp16"

}  // namespace cute_attention
