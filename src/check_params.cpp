#include "check_params.h"

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace cute_attention {
namespace {

constexpr int32_t kVector = 8;             // kernels load 16 bytes at once: so many elements
constexpr int64_t kMaxSpan = 1LL << 39;    // elements; a stride of TMA must be below 2^40 bytes
constexpr float kMaxFactor = 0x1p127f;     // largest scale or softcap: times log2(e) it is finite
constexpr float kMinQuotient = 0x1p-100f;  // of scale and softcap: a score times it is not 0

template <class... Parts>
void require(bool condition, Parts const&... parts) {
  if (condition) return;
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

void check_range(char const* name, int64_t value, int64_t low, int64_t high) {
  require(value >= low && value <= high, name, " is ", value, ", expected ", low, " to ", high);
}

template <class Params>
void check_packing(Params const& p) {
  bool const packed = p.cu_seqlens_q != nullptr;
  require(has_cache(p) || packed == (p.cu_seqlens_k != nullptr), "cu_seqlens_", packed ? "k" : "q",
          " is null, expected it beside cu_seqlens_", packed ? "q" : "k",
          ": both are packed or neither");
  require(!has_cache(p) || p.cu_seqlens_k == nullptr,
          "cu_seqlens_k is given, expected null: the lengths of a cache are cache.seqused_k");
  if (!packed) return;
  int64_t const total_k = has_cache(p) ? 0 : p.total_k;
  check_range("total_q", p.total_q, 0, kMaxPackedRows);
  check_range("total_k", total_k, 0, kMaxPackedRows);
  bool const rows = p.total_q > 0 || total_k > 0;
  require(p.batch > 0 || !rows, "batch is 0, expected 1 or more where there are packed rows");
}

template <class Params>
void check_any_shape(Params const& p) {
  check_range("batch", p.batch, 0, INT32_MAX);
  // Of packed sequences they are bounds, which may be any (calls.h).
  bool const are_bounds = p.cu_seqlens_q != nullptr && !has_grad_bias(p);
  bool const are_bounds_k = are_bounds && p.cu_seqlens_k != nullptr;
  check_range("seqlen_q", p.seqlen_q, 0, are_bounds ? INT32_MAX : kMaxSeqlen);
  check_range("seqlen_k", p.seqlen_k, 0, are_bounds_k ? INT32_MAX : kMaxSeqlen);
  check_range("heads", p.heads, 0, INT32_MAX);
  check_range("heads_kv", p.heads_kv, p.heads > 0 ? 1 : 0, INT32_MAX);
  require(p.heads == 0 || p.heads % p.heads_kv == 0, "heads is ", p.heads,
          ", expected a multiple of heads_kv (", p.heads_kv, ")");
  check_range("head_dim", p.head_dim, 1, INT32_MAX);
  check_range("head_dim_v", p.head_dim_v, 1, INT32_MAX);
  check_range("window_left", p.window_left, 0, INT32_MAX);
  check_range("window_right", p.window_right, 0, INT32_MAX);
  require(std::abs(p.scale) <= kMaxFactor, "scale is ", p.scale,
          ", expected a finite number of at most 2^127");
  require(p.softcap >= 0 && p.softcap <= kMaxFactor, "softcap is ", p.softcap,
          ", expected 0 (none) or a finite number of at most 2^127");
  require(p.softcap == 0 || std::abs(p.scale) / p.softcap <= kMaxFactor / 4, "softcap is ",
          p.softcap, ", too small for scale ", p.scale, ": their quotient overflows");
  require(p.softcap == 0 || p.scale == 0 || std::abs(p.scale) / p.softcap >= kMinQuotient,
          "softcap is ", p.softcap, ", too large for scale ", p.scale,
          ": their quotient is below 2^-100 (0 for no cap)");
  check_packing(p);
}

void check_cache_sizes(KeyCache const& cache, int32_t batch) {
  bool const has_table = cache.block_table != nullptr;
  check_range("cache.pages", cache.pages, 0, INT32_MAX);
  check_range("cache.page_size", cache.page_size, has_table ? 1 : 0, kMaxSeqlen);
  check_range("cache.pages_per_sequence", cache.pages_per_sequence, has_table ? 0 : 1,
              has_table ? kMaxSeqlen / cache.page_size : 1);
  require(has_table || cache.batch_idx != nullptr || cache.pages >= batch, "cache.pages is ",
          cache.pages, ", expected at least ", batch, ": one for each sequence of the batch");
}

// Checks the sizes of a cache, and which of its tensors there are.
void check_cache(ForwardParams const& p) {
  KeyCache const& cache = p.cache;
  bool const has_table = cache.block_table != nullptr;
  if (!has_cache(p)) {
    require(!has_table && cache.leftpad_k == nullptr && cache.batch_idx == nullptr,
            "cache.seqused_k is null, expected it beside the other tensors of a cache");
    return;
  }
  check_cache_sizes(cache, p.batch);
  if (!has_table) return;
  require(cache.page_size % kPageRows == 0, "cache.page_size is ", cache.page_size,
          ", expected a multiple of ", kPageRows);
  require(cache.leftpad_k == nullptr, "cache.leftpad_k is given, expected null beside ",
          "cache.block_table: no kernel skips padding in pages");
}

// What a kernel does with a tensor. In one that it writes, no two elements may share an address.
enum class Access { Read, Write };

struct TensorArgument {
  char const* name;
  void const* data;
  Strides stride;
  int64_t batch;
  int64_t rows;
  int64_t heads;
  int64_t cols;
  bool packed;
  Access access;
};

void check_stride(TensorArgument const& tensor, char const* dimension, int64_t stride,
                  int64_t extent) {
  auto const require_stride = [&](bool condition, auto const&... expected) {
    require(condition, tensor.name, "_stride.", dimension, " is ", stride, ", expected ",
            expected...);
  };
  require_stride(stride % kVector == 0, "a multiple of ", kVector, " elements (16 bytes)");
  if (extent <= 1) return;  // no kernel steps along this dimension: any such stride will do
  require_stride(stride >= 0, "0 or more");
  require_stride(stride <= kMaxSpan / extent, "at most 2^39 / ", extent);
  require_stride(tensor.access == Access::Read || stride >= tensor.cols, "at least ", tensor.cols,
                 ": what is written would overlap");
}

void check_tensor(TensorArgument const& tensor) {
  if (tensor.batch == 0 || tensor.rows == 0 || tensor.heads == 0)
    return;  // no element: the pointer may be null
  require(tensor.data != nullptr, tensor.name, " is null, expected device memory");
  require(reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0, tensor.name, " is ", tensor.data,
          ", expected a multiple of 16 bytes");
  require(!tensor.packed || tensor.stride.batch == 0, tensor.name, "_stride.batch is ",
          tensor.stride.batch, ", expected 0 where sequences are packed");
  check_stride(tensor, "batch", tensor.stride.batch, tensor.batch);
  check_stride(tensor, "row", tensor.stride.row, tensor.rows);
  check_stride(tensor, "head", tensor.stride.head, tensor.heads);
}

// Checks a tensor that has the batch, rows and heads of q, or those of k.
template <class Params>
void check_like_q(Params const& p, char const* name, void const* data, Strides const& stride,
                  int32_t cols, Access access) {
  bool const packed = p.cu_seqlens_q != nullptr;
  check_tensor({name, data, stride, packed ? 1 : p.batch, packed ? p.total_q : p.seqlen_q, p.heads,
                cols, packed, access});
}
template <class Params>
void check_like_k(Params const& p, char const* name, void const* data, Strides const& stride,
                  int32_t cols, Access access) {
  bool const packed = p.cu_seqlens_k != nullptr;
  int64_t batch = packed ? 1 : p.batch, rows = packed ? p.total_k : p.seqlen_k;
  if constexpr (std::is_same_v<Params, ForwardParams>) {
    if (has_cache(p)) batch = p.cache.pages, rows = p.cache.page_size;
  }
  check_tensor({name, data, stride, batch, rows, p.heads_kv, cols, packed, access});
}

template <class Params>
void check_inputs(Params const& p) {
  check_like_q(p, "q", p.q, p.q_stride, p.head_dim, Access::Read);
  check_like_k(p, "k", p.k, p.k_stride, p.head_dim, Access::Read);
  check_like_k(p, "v", p.v, p.v_stride, p.head_dim_v, Access::Read);
}

enum class Presence { Optional, Required };

// Checks a pointer to contiguous numbers; `alignment` is in bytes.
void check_numbers(char const* name, void const* data, int32_t alignment, Presence presence) {
  require(presence == Presence::Optional || data != nullptr, name,
          " is null, expected device memory");
  require(reinterpret_cast<uintptr_t>(data) % alignment == 0, name, " is ", data,
          ", expected a multiple of ", alignment, " bytes");
}

template <class Params>
void check_cu_seqlens(Params const& p) {
  check_numbers("cu_seqlens_q", p.cu_seqlens_q, 4, Presence::Optional);
  check_numbers("cu_seqlens_k", p.cu_seqlens_k, 4, Presence::Optional);
}

// Checks a bias or its gradient.
void check_bias(std::string const& name, BiasTensor const& bias) {
  if (bias.data == nullptr) return;
  auto const check = [&](char const* member, int64_t value, int64_t high) {
    check_range((name + "." + member).c_str(), value, 0, high);
  };
  check("is_float", bias.is_float, 1);
  check_numbers(name.c_str(), bias.data, bias.is_float ? 4 : 2, Presence::Required);
  check("batch_stride", bias.batch_stride, kMaxSpan);
  check("head_stride", bias.head_stride, kMaxSpan);
  check("row_stride", bias.row_stride, kMaxSpan);
  check("col_stride", bias.col_stride, 1);
}

template <class Params>
void check_optional_numbers(Params const& p) {
  check_cu_seqlens(p);
  check_numbers("sink", p.sink, 4, Presence::Optional);
  check_bias("bias", p.bias);
  check_numbers("dropout.seed", p.dropout.seed, 8, Presence::Optional);
  check_range("dropout.drop_count", p.dropout.drop_count, 0, p.dropout.seed == nullptr ? 0 : 256);
  check_numbers("alibi_slopes", p.alibi_slopes.data, 4, Presence::Optional);
  if (p.alibi_slopes.data == nullptr) return;
  check_range("alibi_slopes.batch_stride", p.alibi_slopes.batch_stride, 0, kMaxSpan);
  check_range("alibi_slopes.head_stride", p.alibi_slopes.head_stride, 0, kMaxSpan);
}

void check_cache_numbers(KeyCache const& cache, Presence lengths) {
  check_numbers("cache.seqused_k", cache.seqused_k, 4, lengths);
  check_numbers("cache.leftpad_k", cache.leftpad_k, 4, Presence::Optional);
  check_numbers("cache.batch_idx", cache.batch_idx, 4, Presence::Optional);
  check_numbers("cache.block_table", cache.block_table, 4, Presence::Optional);
  if (cache.block_table != nullptr) {
    check_range("cache.block_table_stride", cache.block_table_stride, 0, kMaxSpan);
  }
}

void check_appended(ForwardParams const& p) {
  if (p.appended.seqused_k == nullptr) return;
  require(has_cache(p),
          "appended.seqused_k is given, expected null unless cache.seqused_k is given");
  check_numbers("appended.seqused_k", p.appended.seqused_k, 4, Presence::Required);
  check_numbers("appended.cu_seqlens", p.appended.cu_seqlens, 4, Presence::Optional);
  check_range("appended.seqlen", p.appended.seqlen, 0, kMaxSeqlen);
}

void check_rotary(RotaryOptions const& rotary, int32_t head_dim) {
  if (rotary.cos == nullptr) return;
  check_range("rotary.rotary_dim", rotary.rotary_dim, 0, head_dim);
  require(rotary.rotary_dim % 2 == 0, "rotary.rotary_dim is ", rotary.rotary_dim,
          ", expected an even number");
  check_range("rotary.positions", rotary.positions, rotary.rotary_dim > 0 ? 1 : 0, INT32_MAX);
  check_numbers("rotary.cos", rotary.cos, rotary.is_float ? 4 : 2, Presence::Required);
  check_numbers("rotary.sin", rotary.sin, rotary.is_float ? 4 : 2, Presence::Required);
  check_range("rotary.cos_stride", rotary.cos_stride, 0, kMaxSpan);
  check_range("rotary.sin_stride", rotary.sin_stride, 0, kMaxSpan);
  check_numbers("rotary.seqlens", rotary.seqlens, 4, Presence::Optional);
}

}  // namespace

void check_append(AppendParams const& p) {
  check_range("batch", p.batch, 0, INT32_MAX);
  check_range("seqlen_new", p.seqlen_new, 0, kMaxSeqlen);
  check_range("seqlen_q", p.seqlen_q, 0, kMaxSeqlen);
  check_range("total_new", p.total_new, 0, kMaxPackedRows);
  check_range("total_q", p.total_q, 0, kMaxPackedRows);
  check_range("heads", p.heads, 0, INT32_MAX);
  check_range("heads_kv", p.heads_kv, 0, INT32_MAX);
  for (auto const& [name, dim] :
       {std::pair<char const*, int32_t>{"head_dim", p.head_dim}, {"head_dim_v", p.head_dim_v}}) {
    require(dim > 0 && dim % kVector == 0, name, " is ", dim, ", expected a multiple of ", kVector);
  }
  bool const packed = p.cu_seqlens_new != nullptr;
  int64_t const rows = packed ? p.total_new : p.seqlen_new;
  int64_t const batch = packed ? 1 : p.batch, heads = p.heads_kv;
  int64_t const pages = p.cache.pages, page_size = p.cache.page_size;
  check_tensor({"k", p.k, p.k_stride, batch, rows, heads, p.head_dim, packed, Access::Read});
  check_tensor({"v", p.v, p.v_stride, batch, rows, heads, p.head_dim_v, packed, Access::Read});
  check_tensor({"k_cache", p.k_cache, p.k_cache_stride, pages, page_size, heads, p.head_dim, false,
                Access::Write});
  check_tensor({"v_cache", p.v_cache, p.v_cache_stride, pages, page_size, heads, p.head_dim_v,
                false, Access::Write});
  if (p.rotary.cos != nullptr) {
    check_like_q(p, "q", p.q, p.q_stride, p.head_dim, Access::Read);
    check_like_q(p, "turned_q", p.turned_q, p.turned_q_stride, p.head_dim, Access::Write);
  }
  check_rotary(p.rotary, p.head_dim);
  check_numbers("cu_seqlens_new", p.cu_seqlens_new, 4, Presence::Optional);
  check_numbers("cu_seqlens_q", p.cu_seqlens_q, 4, Presence::Optional);
  auto const presence = p.batch > 0 ? Presence::Required : Presence::Optional;
  check_cache_sizes(p.cache, p.batch);
  check_cache_numbers(p.cache, presence);
  check_numbers("used", p.used, 4, presence);
}

void check_shape(ForwardParams const& params) {
  check_any_shape(params);
  check_range("num_splits", params.num_splits, 0, kMostSplits);
  check_cache(params);
}

void check_shape(BackwardParams const& params) {
  check_any_shape(params);
  require(params.heads > 0 || params.heads_kv == 0 || rows_k(params) == 0, "heads is 0, expected ",
          "1 or more: no kernel writes the gradients of k and v that no query reads");
}

void check_tensors(ForwardParams const& params) {
  check_inputs(params);
  if (params.qv != nullptr) {
    check_like_q(params, "qv", params.qv, params.qv_stride, params.head_dim_v, Access::Read);
  }
  check_like_q(params, "o", params.o, params.o_stride, params.head_dim_v, Access::Write);
  check_optional_numbers(params);
  check_numbers("lse", params.lse, 4, Presence::Optional);
  check_numbers("next_tile", params.next_tile, 4, Presence::Optional);
  check_numbers("split_workspace", params.split_workspace, 16, Presence::Optional);
  check_cache_numbers(params.cache, Presence::Optional);
  check_appended(params);
}

void check_tensors(BackwardParams const& params) {
  check_inputs(params);
  check_like_q(params, "o", params.o, params.o_stride, params.head_dim_v, Access::Read);
  check_like_q(params, "grad_o", params.grad_o, params.grad_o_stride, params.head_dim_v,
               Access::Read);
  check_like_q(params, "grad_q", params.grad_q, params.grad_q_stride, params.head_dim,
               Access::Write);
  check_like_k(params, "grad_k", params.grad_k, params.grad_k_stride, params.head_dim,
               Access::Write);
  check_like_k(params, "grad_v", params.grad_v, params.grad_v_stride, params.head_dim_v,
               Access::Write);
  check_optional_numbers(params);
  auto const presence = rows_q(params) > 0 ? Presence::Required : Presence::Optional;
  check_numbers("lse", params.lse, 4, presence);
  check_numbers("grad_lse", params.grad_lse, 4, Presence::Optional);
  check_numbers("delta", params.delta, 16, Presence::Optional);
  check_numbers("grad_q_sum", params.grad_q_sum, 16, Presence::Optional);
  check_numbers("grad_q_turn", params.grad_q_turn, 4, Presence::Optional);
  check_numbers("grad_kv_parts", params.grad_kv_parts, 16, Presence::Optional);
  check_numbers("grad_bias_parts", params.grad_bias_parts, 16, Presence::Optional);
  check_numbers("grad_sink", params.grad_sink, 4, Presence::Optional);
  require(params.grad_sink == nullptr || params.sink != nullptr,
          "sink is null, expected it where grad_sink is not");
  check_bias("grad_bias", params.grad_bias);
  require(params.grad_bias.data == nullptr || params.bias.data != nullptr,
          "bias is null, expected it where grad_bias is not");
  require(params.grad_bias.data == nullptr || params.grad_bias.is_float == params.bias.is_float,
          "grad_bias.is_float is ", params.grad_bias.is_float, ", expected ", params.bias.is_float,
          " as in bias");
}

void check_workspaces(BackwardParams const& params, BackwardWorkspace const& sizes) {
  require(params.delta != nullptr || sizes.delta == 0, "delta is null, expected device memory");
  require(params.grad_q_sum != nullptr || sizes.grad_q_sum == 0,
          "grad_q_sum is null, expected device memory");
}

}  // namespace cute_attention
