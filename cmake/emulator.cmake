# emulator.cmake: builds the emulator, which runs kernels on the CPU (docs/emulator.md), and says what
# a kernel library needs to be run by it.
include(cmake/cuda_headers.cmake)

if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  message(FATAL_ERROR "CUTE_ATTENTION_EMULATED: the emulator is for x86-64, and this machine is ${CMAKE_SYSTEM_PROCESSOR}")
endif()

file(GLOB emulator_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/emulator/*.cpp")
add_library(cute_attention_emulator SHARED ${emulator_sources})
target_include_directories(cute_attention_emulator PUBLIC src)
target_link_libraries(cute_attention_emulator PRIVATE cuda_headers)
# It stands in for the CUDA runtime, so it exports what that exports. It runs where it is built.
set_target_properties(cute_attention_emulator PROPERTIES CXX_VISIBILITY_PRESET default)
target_compile_options(cute_attention_emulator PRIVATE -Wall -Wextra -O3 -march=native -ffp-contract=off)

# Has nvcc's targets in the list <flags> end with PTX, which the emulator reads, in plain text.
function(cute_attention_emulated_flags flags)
  string(REGEX REPLACE "arch=compute_([0-9a]+),code=[^;]*" "arch=compute_\\1,code=compute_\\1" result "${${flags}}")
  set(${flags} "${result};-no-compress" PARENT_SCOPE)
endfunction()
