// test_rows.cpp: checks the rows as C++ reads them. With an argument it prints them, and a test in
// Python compares them with the rows that CMake and Python read.
#include <cstdio>
#include <set>

#include "check.h"
#include "kernels/rows.h"

namespace cute_attention {
namespace {

struct NamedRow {
  char const* name;
  KernelKey key;
  KernelConfig config;
};

NamedRow const kRows[] = {
#define CUTE_ATTENTION_FORWARD(NAME, ...) \
  {rows::NAME::kName, rows::NAME::kKey, rows::NAME::kConfig},
#define CUTE_ATTENTION_BACKWARD(NAME, ...) CUTE_ATTENTION_FORWARD(NAME, __VA_ARGS__)
#include "kernels/forward.def"
// The backward table comes second, as in the other readers.
#include "kernels/backward.def"
#undef CUTE_ATTENTION_FORWARD
#undef CUTE_ATTENTION_BACKWARD
};

void print_table() {
  for (auto const& [name, key, config] : kRows) {
    std::printf("%s %d %d %d %d %d %d %u %d %d %d %d\n", name, int(key.arch), int(key.direction),
                int(key.dtype), key.head_dim, key.head_dim_v, int(key.score_mods), key.features,
                config.tile_m, config.tile_n, config.stages, config.warps);
  }
}

void test_rows() {
  std::set<std::string> names;
  for (NamedRow const& row : kRows) {
    testing::check(names.insert(row.name).second, std::string(row.name) + " is named once");
  }
}

}  // namespace
}  // namespace cute_attention

int main(int argc, char**) {
  if (argc > 1) {
    cute_attention::print_table();
    return 0;
  }
  cute_attention::test_rows();
  return cute_attention::testing::report();
}
