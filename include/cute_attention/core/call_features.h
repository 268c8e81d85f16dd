// core/call_features.h: which features of its row's set a call has.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/config.h"

namespace cute_attention {

// Whether a call has `kFeature`, which may be a modifier of the row or dropout. Where the row
// serves no call without it, and where the row does not have it, the compiler knows. Else all
// threads find the same in the arguments of the launch.
//   Params  ForwardParams or BackwardParams
template <uint32_t kScoreMods, uint32_t kFeature, class Params>
CUTE_HOST_DEVICE constexpr bool call_has(Params const& params) {
  static_assert(kFeature == score_mods::Softcap || kFeature == score_mods::Alibi ||
                    kFeature == score_mods::Bias || kFeature == score_mods::Dropout,
                "one member of score_mods");
  if constexpr ((kScoreMods & kFeature) == 0) {
    return false;
  } else if constexpr (!serves_subsets(kScoreMods)) {
    return true;
  } else if constexpr (kFeature == score_mods::Softcap) {
    return params.softcap != 0.f;
  } else if constexpr (kFeature == score_mods::Alibi) {
    return params.alibi_slopes.data != nullptr;
  } else if constexpr (kFeature == score_mods::Bias) {
    return params.bias.data != nullptr;
  } else {
    return params.dropout.seed != nullptr;
  }
}

}  // namespace cute_attention
