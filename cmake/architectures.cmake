# architectures.cmake: CUTE_ATTENTION_ARCHS -> the kernel families to build and nvcc's targets for
# each.
#
# A plain number ("80", "90", "120") adds machine code for that chip to the sm80 family. nvcc makes
# it from compute_80 PTX, or for chips from 9.0 on from compute_90 PTX, since these chips can add
# four floats to global memory at once. The library also contains one PTX, so that it runs on newer
# chips that are not listed: compute_80 if a chip below 9.0 is listed, and otherwise compute_90. A
# number with "a" ("90a") builds the family that is native to that chip. "auto" chooses the entries
# that suit the GPUs of this machine; "" builds no kernels.

# Sets <out> to the entries of CUTE_ATTENTION_ARCHS that suit the GPUs of this machine.
function(cute_attention_detect_archs out)
  set(archs)
  find_program(CUTE_ATTENTION_NVIDIA_SMI nvidia-smi)
  mark_as_advanced(CUTE_ATTENTION_NVIDIA_SMI)
  if(CUTE_ATTENTION_NVIDIA_SMI)
    execute_process(
      COMMAND "${CUTE_ATTENTION_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE output ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${output}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" number "${capability}")
      if(number GREATER_EQUAL 80)
        list(APPEND archs "${number}")
      endif()
      if(number EQUAL 90)
        list(APPEND archs "90a")
      endif()
    endforeach()
    list(REMOVE_DUPLICATES archs)
  endif()
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# Sets <out> to the families that <archs> asks for ("sm80;sm90"), and <out>_<family>_FLAGS to nvcc's
# targets for each.
function(cute_attention_read_archs archs out)
  set(families)
  foreach(arch IN LISTS archs)
    if(arch STREQUAL "90a")
      list(APPEND families sm90)
      set(sm90_flags "-gencode=arch=compute_90a,code=sm_90a")
    elseif(arch MATCHES "^[0-9]+$" AND arch GREATER_EQUAL 80)
      list(APPEND families sm80)
      if(arch LESS 90)
        list(APPEND sm80_targets80 "sm_${arch}")
      else()
        list(APPEND sm80_targets90 "sm_${arch}")
      endif()
    else()
      message(FATAL_ERROR "CUTE_ATTENTION_ARCHS: \"${arch}\" is neither a chip from 80 on nor 90a")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES families)
  set(sm80_flags)
  foreach(ptx 80 90)  # nvcc runs its front half, which is the slow one, once for each of these
    if(sm80_targets${ptx})
      set(code "${sm80_targets${ptx}}")
      if(NOT sm80_flags)
        list(PREPEND code "compute_${ptx}")
      endif()
      list(JOIN code "," code)
      list(APPEND sm80_flags "-gencode=arch=compute_${ptx},code=[${code}]")
    endif()
  endforeach()
  foreach(family IN LISTS families)
    set(${out}_${family}_FLAGS "${${family}_flags}" PARENT_SCOPE)
  endforeach()
  set(${out} "${families}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_COMPILER in the caller, unless the user has set it: to the nvcc of CUDA_HOME,
# CUDA_PATH or the PATH, or else to the one in /usr/local/cuda or from PyPI. If there is none, it
# leaves the variable unset.
function(cute_attention_find_nvcc)
  if(CMAKE_CUDA_COMPILER OR DEFINED ENV{CUDACXX})
    return()
  endif()
  cute_attention_find_python_package(nvidia nvidia_packages)
  find_program(CUTE_ATTENTION_NVCC nvcc
    HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
    PATHS /usr/local/cuda/bin "${nvidia_packages}/cu13/bin")
  mark_as_advanced(CUTE_ATTENTION_NVCC)
  if(CUTE_ATTENTION_NVCC)
    set(CMAKE_CUDA_COMPILER "${CUTE_ATTENTION_NVCC}" PARENT_SCOPE)
  endif()
endfunction()
