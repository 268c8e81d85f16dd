#include "emulator/ptx_text.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace cute_attention::emulator {
namespace {

bool is_space(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }
bool opens(char c) { return c == '{' || c == '(' || c == '['; }
bool closes(char c) { return c == '}' || c == ')' || c == ']'; }

// Directives that end with their line. The emulator needs none of them.
bool is_directive_of_a_line(std::string const& statement) {
  static char const* const kDirectives[] = {".version", ".target",   ".address_size", ".file",
                                            ".loc",     ".maxntid",  ".minnctapersm", ".reqntid",
                                            ".maxnreg", ".noreturn", ".pragma"};
  return std::any_of(std::begin(kDirectives), std::end(kDirectives), [&](char const* directive) {
    return statement.compare(0, std::strlen(directive), directive) == 0;
  });
}

std::vector<std::string> split(std::string const& text, bool at_spaces) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  auto const finish = [&] {
    std::string const trimmed = trim(part);
    if (!trimmed.empty()) parts.push_back(trimmed);
    part.clear();
  };
  for (char const c : text) {
    depth += opens(c) - closes(c);
    if ((c == ',' || (at_spaces && is_space(c))) && (depth == 0 || at_spaces)) {
      finish();
    } else {
      part += c;
    }
  }
  finish();
  return parts;
}

}  // namespace

std::string trim(std::string const& text) {
  auto const first = std::find_if_not(text.begin(), text.end(), is_space);
  auto const last = std::find_if_not(text.rbegin(), text.rend(), is_space).base();
  return first < last ? std::string(first, last) : std::string();
}

std::vector<std::string> split_list(std::string const& text) { return split(text, false); }
std::vector<std::string> split_words(std::string const& text) { return split(text, true); }

bool PtxText::ends_a_label(std::string const& statement) const {
  // "shared::cta" has two colons.
  if (at_ < text_.size() && text_[at_] == ':') return false;
  std::string const name = trim(statement);
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '_' || c == '$' || c == '%';
  });
}

bool PtxText::ends_a_header(std::string const& statement) const {
  if (statement.find(".entry") != std::string::npos) return true;
  if (statement.find(".func") == std::string::npos) return false;
  size_t next = at_;  // a function has a body; its declaration ends with ';'
  while (next < text_.size() && is_space(text_[next])) ++next;
  return next < text_.size() && text_[next] == '{';
}

bool PtxText::next(std::string& statement, char& end) {
  statement.clear();
  int depth = 0;
  while (at_ < text_.size()) {
    char const c = text_[at_];
    if (c == '/' && at_ + 1 < text_.size() && text_[at_ + 1] == '/') {
      at_ = std::min(text_.find('\n', at_), text_.size());
      continue;
    }
    ++at_;
    line_ += c == '\n';
    bool const begins = depth == 0 && trim(statement).empty();
    bool const ends = depth == 0 && (c == ';' || (begins && (c == '{' || c == '}')) ||
                                     (c == ':' && ends_a_label(statement)));
    if (ends) {
      end = c;
      statement = trim(statement);
      return true;
    }
    if (depth == 0 && c == '\n' && is_directive_of_a_line(trim(statement))) {
      statement.clear();
      continue;
    }
    depth += opens(c) - closes(c);
    statement += c;
    if (c == ')' && depth == 0 && ends_a_header(statement)) {
      end = c;
      statement = trim(statement);
      return true;
    }
  }
  return false;
}

}  // namespace cute_attention::emulator
