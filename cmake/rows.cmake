# rows.cmake: the CMake reader of the kernel tables (src/kernels/*.def).

# Sets <out> to the names of a table's rows, in order, and for each row <out>_<name>_ARCH ("sm80"),
# <out>_<name>_DIRECTION ("forward"), <out>_<name>_HEAD_DIM_V, <out>_<name>_TILE_N and <out>_<name>_LINE, the row as it
# stands.
function(cute_attention_read_rows table out)
  file(STRINGS "${table}" lines REGEX "^CUTE_ATTENTION_[A-Z]+\\(")
  set(names)
  foreach(line IN LISTS lines)
    # name, arch, dtype, head_dim, head_dim_v, mask, score_mod, tile_m, tile_n, stages, warps
    if(NOT line MATCHES "^CUTE_ATTENTION_(FORWARD|BACKWARD)\\(([a-z0-9_]+), (Sm[0-9]+), [A-Za-z0-9]+, \
[0-9]+, ([0-9]+), [A-Za-z]+, [A-Za-z]+, [0-9]+, ([0-9]+), [0-9]+, [0-9]+\\)")
      message(FATAL_ERROR "${table}: not a row: ${line}")
    endif()
    set(name "${CMAKE_MATCH_2}")
    string(TOLOWER "${CMAKE_MATCH_1}" direction)
    string(TOLOWER "${CMAKE_MATCH_3}" arch)
    set(${out}_${name}_HEAD_DIM_V "${CMAKE_MATCH_4}" PARENT_SCOPE)
    set(${out}_${name}_TILE_N "${CMAKE_MATCH_5}" PARENT_SCOPE)
    list(APPEND names "${name}")
    set(${out}_${name}_DIRECTION "${direction}" PARENT_SCOPE)
    set(${out}_${name}_ARCH "${arch}" PARENT_SCOPE)
    set(${out}_${name}_LINE "${line}" PARENT_SCOPE)
  endforeach()
  set(${out} "${names}" PARENT_SCOPE)
endfunction()
