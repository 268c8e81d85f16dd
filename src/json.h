// json.h: JSON objects and arrays as text, for Python to read.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>

namespace cute_attention {

// The JSON text of an object or of an array, to which values are added one by one. A value is a
// string, a number, a bool or another Json; other types do not compile.
class Json {
 public:
  static Json object() { return Json('{', '}'); }
  static Json array() { return Json('[', ']'); }

  // The next item of an array.
  template <class Value>
  Json& add(Value const& value) {
    separate();
    write(value);
    return *this;
  }

  // The next member of an object.
  template <class Value>
  Json& set(char const* key, Value const& value) {
    separate();
    write(key);
    text_ += ':';
    write(value);
    return *this;
  }

  std::string text() const { return text_ + close_; }

 private:
  Json(char open, char close) : text_(1, open), close_(close) {}

  void separate() {
    if (text_.size() > 1) text_ += ',';
  }

  void write(Json const& json) { text_ += json.text(); }
  void write(std::string const& text) { write(text.c_str()); }
  void write(int32_t number) { text_ += std::to_string(number); }
  void write(bool truth) { text_ += truth ? "true" : "false"; }
  // JSON has no infinity and no NaN.
  void write(double number) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.6g", number);
    text_ += std::isfinite(number) ? digits : "null";
  }
  void write(char const* text) {
    text_ += '"';
    for (; *text != '\0'; ++text) {
      auto const byte = static_cast<unsigned char>(*text);
      if (byte < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(byte));
        text_ += escaped;
        continue;
      }
      if (byte == '"' || byte == '\\') text_ += '\\';
      text_ += *text;
    }
    text_ += '"';
  }

  std::string text_;
  char close_;
};

// An array of the elements of a container.
template <class Container>
Json json_array(Container const& items) {
  Json json = Json::array();
  for (auto const& item : items) json.add(item);
  return json;
}
template <class Item>
Json json_array(std::initializer_list<Item> items) {
  return json_array<std::initializer_list<Item>>(items);
}

}  // namespace cute_attention
