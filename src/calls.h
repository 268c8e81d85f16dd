// calls.h: the calls of c_api.h: arguments checked, a row found, a kernel launched. What is wrong
// is thrown as an exception that says it; then nothing has been launched.
#pragma once

#include "cute_attention/c_api.h"
#include "cute_attention/kernel_library.h"

namespace cute_attention {

// `arch`, `device` and `stream` are those of c_api.h, and so is what the workspaces are for.
void forward(ForwardParams const& p, DType dtype, int32_t arch, int32_t device, void* stream);
ForwardWorkspace forward_workspace(ForwardParams const& p, DType dtype, int32_t arch,
                                   int32_t device);
void append(AppendParams const& p, DType dtype, int32_t arch, int32_t device, void* stream);
void backward(BackwardParams const& p, DType dtype, int32_t arch, int32_t device, void* stream);
BackwardWorkspace backward_workspace(BackwardParams const& p, DType dtype, int32_t arch,
                                     int32_t device);

// The GPU of a number of CUDA's. Throws std::invalid_argument where there is none.
DeviceInfo const& device_at(int32_t ordinal);

// Packed rows after the last sequence are written too, where all sequences are empty as well: a
// grid for sequences of one row has CTAs to write them.
template <class Params>
Params with_a_grid(Params const& p) {
  Params launched = p;
  if (p.cu_seqlens_q != nullptr && p.seqlen_q == 0) launched.seqlen_q = 1;
  return launched;
}

}  // namespace cute_attention
