// export.h: writes the layouts of one row into a JSON file.
#pragma once

#include "layouts/host_cuda.h"  // before everything else

#include <fstream>
#include <string>

#include "json.h"

namespace cute_attention::layouts {

// `Description` is the class that describes the kernels of a family, with the traits of the row as
// its argument: for example Sm80Forward<sm80::ForwardTraits<Row>>.
template <class Description>
void export_row(std::string const& folder, char const* name) {
  std::ofstream file(folder + "/" + name + ".json");
  file << Json::object()
              .set("plan", Description::plan())
              .set("roles", Description::roles())
              .set("copies", Description::copies())
              .set("products", Description::products())
              .text()
       << "\n";
}

}  // namespace cute_attention::layouts
