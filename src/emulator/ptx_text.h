// emulator/ptx_text.h: PTX text, split into statements and lists.
#pragma once

#include <string>
#include <vector>

namespace cute_attention::emulator {

std::string trim(std::string const& text);

// The parts between commas outside of brackets.
std::vector<std::string> split_list(std::string const& text);

// The words between white space and commas.
std::vector<std::string> split_words(std::string const& text);

class PtxText {
 public:
  explicit PtxText(std::string const& text) : text_(text) {}

  // The next statement, and what ended it: ';', ':' behind a label, '{' or '}' of a scope (the
  // statement is empty then), or ')' behind the header of a function. False at the end.
  bool next(std::string& statement, char& end);

  int line() const { return line_; }

 private:
  bool ends_a_label(std::string const& statement) const;
  bool ends_a_header(std::string const& statement) const;

  std::string const& text_;
  size_t at_ = 0;
  int line_ = 1;
};

}  // namespace cute_attention::emulator
