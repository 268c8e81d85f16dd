// core/keep_scale.h: what dropout multiplies by where it keeps a probability, and where kernels do
// it: once for a row of O, of dQ, dK and dV, and never for a score.
//
// With Z = 1 where a probability is kept, else 0, and c = keep_scale(),
//
//   O = c (Z P) V    dV = c (Z P)^T dO    dS = P (c Z dP + delta) = c P (Z dP + delta / c)
//
// So delta is divided by c when it is computed (backward_prepare.h), and all that is computed from
// dS is multiplied by c in the end.
#pragma once

#include <cute/config.hpp>

#include "cute_attention/params.h"

namespace cute_attention {

// 256 / (256 - drop_count), or 1 where there is no dropout and where no probability is kept.
CUTE_HOST_DEVICE float keep_scale(DropoutOptions const& dropout) {
  float const kept = float(dropout.drop_count == 256 ? 256 : 256 - dropout.drop_count);
#ifdef __CUDA_ARCH__
  return __fdividef(256.f, kept);  // 2 ulp, and no call of a function
#else
  return 256.f / kept;
#endif
}

// What dQ and dK are multiplied by in the end: dS is of scaled scores, q and k are not scaled.
CUTE_HOST_DEVICE float grad_qk_scale(BackwardParams const& params) {
  return params.scale * keep_scale(params.dropout);
}
// What dV is multiplied by in the end.
CUTE_HOST_DEVICE float grad_v_scale(BackwardParams const& params) {
  return keep_scale(params.dropout);
}

}  // namespace cute_attention
