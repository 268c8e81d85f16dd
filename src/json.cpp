#include "json.h"

#include <cmath>
#include <cstdio>

namespace cute_attention {

void JsonWriter::separate() {
  if (text_.empty()) return;
  char const last = text_.back();
  if (last != '{' && last != '[' && last != ':') text_ += ',';
}

JsonWriter& JsonWriter::open(char bracket) {
  separate();
  text_ += bracket;
  return *this;
}

JsonWriter& JsonWriter::close(char bracket) {
  text_ += bracket;
  return *this;
}

void JsonWriter::quote(char const* text) {
  text_ += '"';
  for (; *text != '\0'; ++text) {
    auto const byte = static_cast<unsigned char>(*text);
    if (byte == '"' || byte == '\\') {
      text_ += '\\';
      text_ += *text;
    } else if (byte < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(byte));
      text_ += escaped;
    } else {
      text_ += *text;
    }
  }
  text_ += '"';
}

JsonWriter& JsonWriter::key(char const* name) {
  separate();
  quote(name);
  text_ += ':';
  return *this;
}

JsonWriter& JsonWriter::value(char const* text) {
  separate();
  quote(text);
  return *this;
}

JsonWriter& JsonWriter::value(int32_t number) {
  separate();
  text_ += std::to_string(number);
  return *this;
}

JsonWriter& JsonWriter::value(double number) {
  separate();
  if (!std::isfinite(number)) {
    text_ += "null";
    return *this;
  }
  char digits[32];
  std::snprintf(digits, sizeof(digits), "%.6g", number);
  text_ += digits;
  return *this;
}

JsonWriter& JsonWriter::value(bool truth) {
  separate();
  text_ += truth ? "true" : "false";
  return *this;
}

}  // namespace cute_attention
