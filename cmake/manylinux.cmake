# manylinux.cmake: links the libraries so that they run on every system from glibc 2.28 and the
# libstdc++ of GCC 8 on, which is what the wheel tag manylinux_2_28 promises, although they are built
# on a newer system. `make wheels` has auditwheel check it.
#
# A reference to a function of glibc names the version that the function has where it is linked.
# glibc 2.34 moved the functions of libdl, libpthread and librt into libc and gave them that
# version, though they do the same as before. So the libraries are linked against stand-ins for
# those three, in which the functions have the versions of before. Every glibc, old or new, finds
# them by these. What newer headers of libstdc++ need besides is in src/manylinux/libstdcxx.cpp.

# Adds the library <name> of glibc with functions that do nothing. Each function is preceded by its
# version: "GLIBC_2.2.5 dlopen dlsym GLIBC_2.3.4 dlmopen".
function(cute_attention_add_stand_in name soversion functions)
  set(folder "${PROJECT_BINARY_DIR}/manylinux")
  set(code "")
  set(script "")
  set(previous "")
  foreach(word IN LISTS functions)
    if(word MATCHES "^GLIBC_")
      string(APPEND script "${previous}${word} {\n")
      set(previous "}${after};\n")
      set(after " ${word}")
    else()
      string(APPEND code "void ${word}() {}\n")
      string(APPEND script "  ${word};\n")
    endif()
  endforeach()
  file(CONFIGURE OUTPUT "${folder}/${name}.cpp" CONTENT "extern \"C\" {\n${code}}\n" @ONLY)
  file(CONFIGURE OUTPUT "${folder}/${name}.map" CONTENT "${script}${previous}" @ONLY)
  add_library(cute_attention_old_${name} SHARED "${folder}/${name}.cpp")
  # A compiler that knows these functions knows them by other types.
  target_compile_options(cute_attention_old_${name} PRIVATE -fno-builtin -fvisibility=default)
  target_link_options(cute_attention_old_${name} PRIVATE -nostdlib
    "-Wl,--version-script=${folder}/${name}.map")
  set_target_properties(cute_attention_old_${name} PROPERTIES OUTPUT_NAME ${name}
    SOVERSION ${soversion} LIBRARY_OUTPUT_DIRECTORY "${folder}")
endfunction()

# Has <target> link so if CUTE_ATTENTION_MANYLINUX is on.
function(cute_attention_lower_glibc target)
  if(NOT CUTE_ATTENTION_MANYLINUX)
    return()
  endif()
  add_dependencies(${target} cute_attention_old_dl cute_attention_old_pthread cute_attention_old_rt)
  target_link_directories(${target} BEFORE PRIVATE "${PROJECT_BINARY_DIR}/manylinux")
  target_link_libraries(${target} PRIVATE cute_attention_libstdcxx)
  target_link_options(${target} PRIVATE -Wl,--exclude-libs,ALL)
endfunction()

if(CUTE_ATTENTION_MANYLINUX)
  if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64" OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    message(FATAL_ERROR "CUTE_ATTENTION_MANYLINUX needs GCC on x86_64, and this is "
      "${CMAKE_CXX_COMPILER_ID} on ${CMAKE_SYSTEM_PROCESSOR}: the versions of glibc's functions in "
      "cmake/manylinux.cmake are those of x86_64. Without it the build works, for this system.")
  endif()
  cute_attention_add_stand_in(dl 2
    "GLIBC_2.2.5;dladdr;dlclose;dlerror;dlopen;dlsym;dlvsym;GLIBC_2.3.4;dlmopen")
  set(pthread GLIBC_2.2.5)
  foreach(function
      condattr_setpshared create detach getspecific join key_create key_delete kill mutex_trylock
      mutexattr_destroy mutexattr_init mutexattr_setpshared mutexattr_settype once rwlock_destroy
      rwlock_init rwlock_rdlock rwlock_timedrdlock rwlock_timedwrlock rwlock_tryrdlock
      rwlock_trywrlock rwlock_unlock rwlock_wrlock rwlockattr_destroy rwlockattr_init
      rwlockattr_setpshared setspecific spin_destroy spin_init spin_lock spin_trylock spin_unlock)
    list(APPEND pthread pthread_${function})
  endforeach()
  list(APPEND pthread sem_destroy sem_init sem_post sem_timedwait sem_trywait sem_wait)
  cute_attention_add_stand_in(pthread 0 "${pthread}")
  cute_attention_add_stand_in(rt 1 "GLIBC_2.2.5;shm_open;shm_unlink")
  add_library(cute_attention_libstdcxx STATIC src/manylinux/libstdcxx.cpp)
endif()
