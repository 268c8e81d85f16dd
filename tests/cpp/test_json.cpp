// test_json.cpp: compares the text of JSON objects and arrays byte for byte.
#include "json.h"

#include <limits>
#include <string>
#include <vector>

#include "check.h"

namespace cute_attention {
namespace {

using testing::check_equal;

void check_text(Json const& json, std::string const& expected) {
  check_equal(json.text(), expected, "text");
}

void check_values() {
  check_text(Json::object(), "{}");
  check_text(Json::array(), "[]");
  check_text(Json::array().add(1).add(-2147483647 - 1), "[1,-2147483648]");
  check_text(Json::array().add(true).add(false), "[true,false]");
  check_text(Json::array().add("a").add(std::string("b")).add(""), R"(["a","b",""])");
  double const infinity = std::numeric_limits<double>::infinity();
  check_text(Json::array().add(0.5).add(1e30).add(1234567.0), "[0.5,1e+30,1.23457e+06]");
  check_text(Json::array().add(infinity).add(infinity - infinity), "[null,null]");
  check_text(json_array(std::vector<int>{3, 1}), "[3,1]");
  check_text(json_array({"one", "two"}), R"(["one","two"])");
}

// Characters that would end a string of JSON, or that may not be in one, are escaped. UTF-8 stays
// as it is.
void check_escapes() {
  check_text(Json::array().add("\"\\\n\t\x01/\xc3\xa9"),
             "[\"\\\"\\\\\\u000a\\u0009\\u0001/\xc3\xa9\"]");
  check_text(Json::object().set("a\"b", 1), R"({"a\"b":1})");
}

void check_nesting() {
  Json const inner = Json::array().add(Json::object()).add(Json::array().add(1));
  check_text(Json::object().set("a", inner).set("b", Json::object().set("c", "d")),
             R"({"a":[{},[1]],"b":{"c":"d"}})");
}

}  // namespace
}  // namespace cute_attention

int main() {
  using namespace cute_attention;
  check_values();
  check_escapes();
  check_nesting();
  return testing::report();
}
