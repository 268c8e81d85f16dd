// torch_stack.h: the arguments and results of an op on the LibTorch stable ABI.
#pragma once

#include <torch/csrc/stable/library.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch_tensors.h"

namespace cute_attention {

// The arguments of an op, which are read one after the other, in the order of its schema, and live
// as long as this object. TORCH_BOX would take an allocation and a shared count for each tensor,
// and never frees a string (torch 2.10 to 2.13).
class Stack {
 public:
  explicit Stack(StableIValue* values) : values_(values) { held_.reserve(kMostTensors); }

  TensorView tensor() { return held(next<AtenTensorHandle>()); }
  OptionalTensor optional_tensor() {
    auto const handle = next<std::optional<AtenTensorHandle>>();
    return handle ? OptionalTensor(held(*handle)) : std::nullopt;
  }
  std::string text() {
    struct Delete {
      void operator()(StringOpaque* string) const { torch_delete_string(string); }
    };
    std::unique_ptr<StringOpaque, Delete> const string(next<StringHandle>());
    size_t length = 0;
    char const* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(string.get(), &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(string.get(), &data));
    return {data, length};
  }
  double real() { return next<double>(); }
  int64_t integer() { return next<int64_t>(); }
  std::optional<int64_t> optional_integer() { return next<std::optional<int64_t>>(); }
  bool flag() { return next<bool>(); }

  // Puts the results in the places of the arguments, all of which have been read.
  void put(std::initializer_list<Tensor*> results) {
    StableIValue* place = values_;
    for (Tensor* const result : results) {
      *place++ = torch::stable::detail::from(result->release());
    }
  }

 private:
  static constexpr size_t kMostTensors = 20;

  template <class T>
  T next() {
    return torch::stable::detail::to<T>(*next_++);
  }
  TensorView held(AtenTensorHandle handle) {
    held_.emplace_back(handle);
    return TensorView(handle);
  }

  StableIValue* values_;
  StableIValue* next_ = values_;
  std::vector<Tensor> held_;
};

}  // namespace cute_attention
