# cuda_headers.cmake: finds the headers of the CUDA runtime and of CCCL, from PyPI or from an
# installed toolkit. Host code that includes CuTe needs them. Defines the interface library
# `cuda_headers`.
cute_attention_find_python_package(nvidia nvidia_packages)
find_path(CUTE_ATTENTION_CUDA_INCLUDE cuda_runtime_api.h
  HINTS "${nvidia_packages}/cu13/include" ENV CUDA_HOME ENV CUDA_PATH /usr/local/cuda PATH_SUFFIXES include)
mark_as_advanced(CUTE_ATTENTION_CUDA_INCLUDE)
if(NOT CUTE_ATTENTION_CUDA_INCLUDE)
  message(FATAL_ERROR "The CUDA headers were not found. Get them with\n"
    "  pip install \"cuda-toolkit[cudart,cccl,crt]==13.*\"")
endif()
add_library(cuda_headers INTERFACE)
target_include_directories(cuda_headers SYSTEM INTERFACE
  "${CUTE_ATTENTION_CUDA_INCLUDE}" "${CUTE_ATTENTION_CUDA_INCLUDE}/cccl")
