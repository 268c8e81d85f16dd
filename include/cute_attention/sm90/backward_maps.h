// sm90/backward_maps.h: the tensor maps of the inputs of the sm90 backward kernels.
#pragma once

#include "cute_attention/sm90/backward_traits.h"
#include "cute_attention/sm90/tensor_map.h"

namespace cute_attention::sm90 {

// Makes the maps of q, grad_o, k and v, whose boxes have the rows of a tile of Traits.
//   Arguments  BackwardArguments, or another that has these members
template <class Traits, class Arguments>
cudaError_t make_backward_maps(Arguments& arguments) {
  BackwardParams const& p = arguments.params;
  bool const packed = p.cu_seqlens_q != nullptr;
  int64_t const rows_q = packed ? p.total_q : p.seqlen_q;
  int64_t const rows_k = packed ? p.total_k : p.seqlen_k;
  int64_t const batch = packed ? 1 : p.batch;
  if (rows_q == 0 || rows_k == 0) {
    return cudaSuccess;  // nobody reads them: a tensor map has a row at least
  }
  struct {
    CUtensorMap* map;
    TensorView view;
    Box box;
  } const all[] = {
      {&arguments.map_q,
       {p.q, batch, rows_q, p.heads, p.head_dim, p.q_stride},
       {Traits::kBox, 1, Traits::kTileM}},
      {&arguments.map_grad_o,
       {p.grad_o, batch, rows_q, p.heads, p.head_dim_v, p.grad_o_stride},
       {Traits::kBoxV, 1, Traits::kTileM}},
      {&arguments.map_k,
       {p.k, batch, rows_k, p.heads_kv, p.head_dim, p.k_stride},
       {Traits::kBoxColsK, 1, Traits::kTileN}},
      {&arguments.map_v,
       {p.v, batch, rows_k, p.heads_kv, p.head_dim_v, p.v_stride},
       {Traits::kBoxV, 1, Traits::kTileN}},
  };
  for (auto const& each : all) {
    cudaError_t const error =
        make_tensor_map<typename Traits::Element>(each.map, each.view, 1, each.box);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace cute_attention::sm90
