# architectures.cmake: CUTE_ATTENTION_ARCHS -> the kernel families to build and nvcc's targets for
# each.
#
# A plain number ("80", "90", "120") adds machine code for that chip to the sm80 family. nvcc makes
# it from PTX: compute_80 if a chip below 9.0 is listed, and otherwise compute_90. The library also
# contains that PTX, so that it runs on newer chips that are not listed. Chips from 9.0 on can add
# four floats to global memory at once, but only with code from compute_90 PTX. So backward kernels,
# which alone add there, are compiled from both where chips of both kinds are listed; forward kernels
# have the same machine code from either. nvcc runs its front half, the slow one, for each PTX.
#
# A number with "a" ("90a") builds the family that is native to that chip. "auto" chooses the
# entries that suit the GPUs of this machine; "" builds no kernels.

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

# Sets <out> to the option that makes the PTX of compute_<ptx>, and from it what else is named.
function(cute_attention_target out ptx)
  list(JOIN ARGN "," code)
  set(${out} "-gencode=arch=compute_${ptx},code=[${code}]" PARENT_SCOPE)
endfunction()

# Sets <out> to the families that <archs> asks for ("sm80;sm90"), and <out>_<family>_forward_FLAGS
# and <out>_<family>_backward_FLAGS to nvcc's targets for each.
function(cute_attention_read_archs archs out)
  set(families)
  set(older)  # machine code for chips before 9.0
  set(newer)
  foreach(arch IN LISTS archs)
    if(arch STREQUAL "90a")
      list(APPEND families sm90)
    elseif(arch MATCHES "^[0-9]+$" AND arch GREATER_EQUAL 80)
      list(APPEND families sm80)
      if(arch LESS 90)
        list(APPEND older "sm_${arch}")
      else()
        list(APPEND newer "sm_${arch}")
      endif()
    else()
      message(FATAL_ERROR "CUTE_ATTENTION_ARCHS: \"${arch}\" is neither a chip from 80 on nor 90a")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES families)
  set(sm90_forward_flags "-gencode=arch=compute_90a,code=sm_90a")
  set(sm90_backward_flags "${sm90_forward_flags}")
  if(older)
    cute_attention_target(sm80_forward_flags 80 compute_80 ${older} ${newer})
    cute_attention_target(sm80_backward_flags 80 compute_80 ${older})
    if(newer)
      cute_attention_target(from_ptx_90 90 ${newer})
      list(APPEND sm80_backward_flags "${from_ptx_90}")
    endif()
  else()
    cute_attention_target(sm80_forward_flags 90 compute_90 ${newer})
    set(sm80_backward_flags "${sm80_forward_flags}")
  endif()
  foreach(family IN LISTS families)
    foreach(direction forward backward)
      set(${out}_${family}_${direction}_FLAGS "${${family}_${direction}_flags}" PARENT_SCOPE)
    endforeach()
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
