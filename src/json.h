// json.h: writes the JSON that Python reads: objects and arrays of strings, integers, numbers and
// booleans.
#pragma once

#include <cstdint>
#include <string>

namespace cute_attention {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }
  JsonWriter& key(char const* name);

  JsonWriter& value(char const* text);
  JsonWriter& value(std::string const& text) { return value(text.c_str()); }
  JsonWriter& value(int32_t number);
  JsonWriter& value(double number);
  JsonWriter& value(bool truth);

  template <class T>
  JsonWriter& field(char const* name, T const& content) {
    return key(name).value(content);
  }

  std::string const& text() const { return text_; }

 private:
  JsonWriter& open(char bracket);
  JsonWriter& close(char bracket);
  void separate();
  void quote(char const* text);

  std::string text_;
};

}  // namespace cute_attention
