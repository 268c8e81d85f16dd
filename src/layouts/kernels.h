// kernels.h: the kernels of a row that layouts describe.
#pragma once

#include "json.h"

namespace cute_attention::layouts {

// What a class says of a kernel whose layouts it describes: for example
// Sm80Forward<sm80::ForwardTraits<Row>>. Its name is that among the kernels of the row, "" for the
// only one.
template <class Description>
Json kernel_json() {
  return Json::object()
      .set("name", Description::kName)
      .set("tile", json_array({Description::kTileM, Description::kTileN}))
      .set("plan", Description::plan())
      .set("roles", Description::roles())
      .set("copies", Description::copies())
      .set("products", Description::products());
}

// The kernels of a row, in the order in which they run.
template <class... Descriptions>
struct Kernels {
  static Json json() {
    Json kernels = Json::array();
    (kernels.add(kernel_json<Descriptions>()), ...);
    return kernels;
  }
};

}  // namespace cute_attention::layouts
