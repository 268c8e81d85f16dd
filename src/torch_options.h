// torch_options.h: the options of a call, as the ops are given them.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <istream>
#include <locale>
#include <sstream>
#include <string>
#include <unordered_map>

#include "cute_attention/c_api.h"
#include "cute_attention/config.h"

namespace cute_attention {

struct Options {
  int32_t arch;
  double scale;
  int64_t window_left;
  int64_t window_right;
  double softcap;
};

// `arch` of the C API for the text that an op is given: a family of kernels, or the name of the one
// row that is to serve the call.
inline int32_t arch_of(std::string const& backend) {
  if (backend == "sm80") return static_cast<int32_t>(Arch::Sm80);
  if (backend == "sm90") return static_cast<int32_t>(Arch::Sm90);
  int32_t const row = cute_attention_row(backend.c_str());
  STD_TORCH_CHECK(
      row != 0, "cute_attention: backend is '", backend,
      "', expected 'sm80', 'sm90' or the name of a kernel: ", cute_attention_last_error());
  return row;
}

// Those of a call with a cache.
struct CacheOptions : Options {
  int64_t num_splits;
  bool batch_invariant;
  bool rotary_interleaved;
  bool turns_each_query;
};

// The words of a text that say the options, and what they are called, for messages.
inline char const* read_words(std::istream& words, std::string& backend, Options& options) {
  words >> backend >> options.scale >> options.window_left >> options.window_right >>
      options.softcap;
  return "backend, scale, window_left, window_right and softcap";
}
inline char const* read_words(std::istream& words, std::string& backend, CacheOptions& options) {
  read_words(words, backend, static_cast<Options&>(options));
  words >> options.num_splits >> options.batch_invariant >> options.rotary_interleaved >>
      options.turns_each_query;
  return "backend, scale, window_left, window_right, softcap, num_splits, batch_invariant, "
         "rotary_interleaved and turns_each_query";
}

template <class Read>
Read parsed_options(std::string const& text) {
  std::istringstream words(text);
  words.imbue(std::locale::classic());
  std::string backend;
  Read options{};
  char const* const expected = read_words(words, backend, options);
  STD_TORCH_CHECK(!words.fail() && (words >> std::ws).eof(), "cute_attention: options are '", text,
                  "', expected ", expected);
  options.arch = arch_of(backend);
  return options;
}

// The options that a text says, such as "sm90 0.125 -1 0 0.0", or for a call with a cache
// "sm90 0.125 -1 0 0.0 0 0 1 1". Texts that have come before are remembered: reading one takes a
// microsecond.
template <class Read>
Read brief_options(std::string const& text) {
  constexpr size_t kMostTexts = 1024;  // then all are forgotten: a scale may differ at every call
  thread_local std::unordered_map<std::string, Read> remembered;
  auto const found = remembered.find(text);
  if (found != remembered.end()) return found->second;
  if (remembered.size() >= kMostTexts) remembered.clear();
  return remembered.emplace(text, parsed_options<Read>(text)).first->second;
}

}  // namespace cute_attention
