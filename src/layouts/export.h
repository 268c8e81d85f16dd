// export.h: one row's layouts as a JSON file.
#pragma once

#include "layouts/host_cuda.h"  // before everything else

#include <fstream>
#include <string>

#include "json.h"

namespace cute_attention::layouts {

// `Description` is the adapter of a kernel family over its traits, e.g.
// Sm80Forward<sm80::ForwardTraits<Row>>.
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
