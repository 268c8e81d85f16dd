# cutlass.cmake: where the CuTe and CUTLASS headers come from. The nvidia-cutlass wheel carries them; CUTLASS_DIR, a
# checkout of CUTLASS, takes its place where set. Defines the interface library `cutlass`.
set(CUTE_ATTENTION_CUTLASS_VERSION 4.2.0)
set(CUTLASS_DIR "" CACHE PATH "A CUTLASS checkout to use instead of the nvidia-cutlass wheel")

if(CUTLASS_DIR)
  set(cutlass_include "${CUTLASS_DIR}/include")
else()
  cute_attention_find_python_package(cutlass_library cutlass_package)
  if(NOT cutlass_package)
    message(FATAL_ERROR "The kernels need the CuTe headers. Get them with\n"
      "  pip install --no-deps nvidia-cutlass==${CUTE_ATTENTION_CUTLASS_VERSION}.0\n"
      "or set CUTLASS_DIR to a checkout of CUTLASS ${CUTE_ATTENTION_CUTLASS_VERSION}.")
  endif()
  set(cutlass_include "${cutlass_package}/source/include")
endif()

set(cutlass_version_file "${cutlass_include}/cutlass/version.h")
if(NOT EXISTS "${cutlass_version_file}")
  message(FATAL_ERROR "No CUTLASS headers in ${cutlass_include}")
endif()
file(STRINGS "${cutlass_version_file}" lines REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) +[0-9]+")
string(REGEX REPLACE "[^;]*CUTLASS_[A-Z]+ +([0-9]+)[^;]*" "\\1" numbers "${lines}")
string(JOIN "." cutlass_version ${numbers})
if(NOT cutlass_version VERSION_EQUAL CUTE_ATTENTION_CUTLASS_VERSION)
  message(FATAL_ERROR "${cutlass_include} holds CUTLASS ${cutlass_version}; the kernels are written for "
    "${CUTE_ATTENTION_CUTLASS_VERSION}.")
endif()

add_library(cutlass INTERFACE)
target_include_directories(cutlass SYSTEM INTERFACE "${cutlass_include}")
message(STATUS "cute-attention: CUTLASS ${cutlass_version} in ${cutlass_include}")
