// emulator/ptx_variable.h: the declaration of a variable or of a kernel's parameter.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator/ptx.h"
#include "emulator/ptx_text.h"

namespace cute_attention::emulator {

// A variable's declaration, such as ".shared .align 16 .b8 name[64]". A size that is left open is
// 0.
struct Variable {
  std::string space, name;
  uint32_t align = 1;
  uint32_t element = 4;
  uint32_t count = 1;
  bool is_open = false;

  explicit Variable(std::string const& declaration) {
    std::vector<std::string> const words =
        split_words(declaration.substr(0, declaration.find('=')));
    for (size_t i = 0; i < words.size(); ++i) {
      std::string const& word = words[i];
      if (word == ".align") {
        align = std::stoul(words[++i]);
      } else if (word == ".shared" || word == ".global" || word == ".const" || word == ".local" ||
                 word == ".param") {
        space = word;
      } else if (word[0] != '.') {
        name = word;
      } else if (bytes_of(word.substr(1)) != 0) {
        element = bytes_of(word.substr(1));
      }
    }
    size_t const bracket = name.find('[');
    if (bracket != std::string::npos) {
      is_open = name[bracket + 1] == ']';
      count = is_open ? 0 : std::stoul(name.substr(bracket + 1));
      name.resize(bracket);
    }
    align = std::max(align, element);
  }
  uint32_t bytes() const { return element * count; }
};

}  // namespace cute_attention::emulator
