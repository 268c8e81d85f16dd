// list_kernels.cpp: the kernel libraries and the kernels that a C++ program finds. Needs no GPU.
#include <cute_attention/c_api.h>

#include <cstdio>

int main() {
  char const* const libraries = cute_attention_libraries_json();
  if (libraries == nullptr) {
    std::fprintf(stderr, "%s\n", cute_attention_last_error());
    return 1;
  }
  std::printf("%s\n", libraries);
  std::printf("%s\n", cute_attention_kernels_json());
  return 0;
}
