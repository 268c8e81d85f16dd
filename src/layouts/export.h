// export.h: writes the layouts of one row into a JSON file.
#pragma once

#include "layouts/host_cuda.h"  // before everything else

#include <fstream>
#include <string>

#include "layouts/kernels.h"

namespace cute_attention::layouts {

// `KernelsOfRow` lists the kernels of the row: for example Sm80ForwardKernels<Row>.
template <class KernelsOfRow>
void export_row(std::string const& folder, char const* name) {
  std::ofstream file(folder + "/" + name + ".json");
  file << KernelsOfRow::json().text() << "\n";
}

}  // namespace cute_attention::layouts
