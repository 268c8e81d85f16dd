// calls.h: the calls of c_api.h: arguments checked, a row found, a kernel launched. What is wrong
// is thrown as an exception that says it; then nothing has been launched.
#pragma once

#include "check_params.h"
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

// What a launch is told of the longest packed sequence: what the caller said, but no more than
// there are rows. Grids, workspaces and the choice of a row grow with it.
constexpr int32_t longest_packed(int32_t said, int64_t rows) {
  int64_t const most = rows < kMaxSeqlen ? rows : kMaxSeqlen;
  return int32_t(said < most ? said : most);
}

// A packed call as it is launched. Its lengths are those of longest_packed(), unless a gradient of
// a bias has as many rows and columns as the caller said. Packed rows after the last sequence are
// written too, where all sequences are empty as well: a grid for sequences of one row has CTAs to
// write them.
template <class Params>
Params with_a_grid(Params const& p) {
  Params launched = p;
  if (p.cu_seqlens_q != nullptr && !has_grad_bias(p)) {
    launched.seqlen_q = longest_packed(p.seqlen_q, p.total_q);
    if (p.cu_seqlens_k != nullptr) launched.seqlen_k = longest_packed(p.seqlen_k, p.total_k);
  }
  if (p.cu_seqlens_q != nullptr && launched.seqlen_q == 0) launched.seqlen_q = 1;
  return launched;
}

}  // namespace cute_attention
