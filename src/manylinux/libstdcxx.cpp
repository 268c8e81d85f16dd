// libstdcxx.cpp: what code that newer headers of libstdc++ inline needs of newer systems, for
// libraries that must run on older ones (cmake/manylinux.cmake). A library that is linked with this
// archive takes these from here and exports none of them.
#include <new>
#include <sstream>

// glibc 2.32 has this variable, which says whether the process has one thread alone.
// std::shared_ptr then counts without atomic instructions. "No" is always right.
extern "C" {
char __libc_single_threaded = 0;
}

namespace std {

// The headers of GCC 11 and newer call it for a number of elements that no allocation can hold.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

// Headers of GCC 9 and newer declare that libstdc++ contains these.
template basic_ostringstream<char>::basic_ostringstream();
template basic_stringstream<char>::basic_stringstream();

}  // namespace std
