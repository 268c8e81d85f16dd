# rows.cmake: reads the kernel tables (src/kernels/*.def) for CMake, and says with which options a
# row is compiled.

# Sets <out> to the names of a table's rows, in order, and for each row <out>_<name>_ARCH ("sm80"),
# <out>_<name>_DIRECTION ("forward"), <out>_<name>_PTXAS ("O1"), <out>_<name>_LINE, the row as the
# table has it, and the numbers of <out>_<name>_HEAD_DIM, _HEAD_DIM_V, _TILE_M, _TILE_N and _WARPS.
function(cute_attention_read_rows table out)
  file(STRINGS "${table}" lines REGEX "^CUTE_ATTENTION_[A-Z]+\\(")
  set(names)
  foreach(line IN LISTS lines)
    # name, arch, dtype, head_dim, head_dim_v, score_mods, tile_m, tile_n, stages, warps, ptxas
    if(NOT line MATCHES "^CUTE_ATTENTION_(FORWARD|BACKWARD)\\(([a-z0-9_]+), (Sm[0-9]+), [A-Za-z0-9]+, \
([0-9]+), ([0-9]+), [A-Za-z|]+, ([0-9]+), ([0-9]+), [0-9]+, ([0-9]+), (O[0-3])\\)")
      message(FATAL_ERROR "${table}: not a row: ${line}")
    endif()
    set(name "${CMAKE_MATCH_2}")
    string(TOLOWER "${CMAKE_MATCH_1}" direction)
    string(TOLOWER "${CMAKE_MATCH_3}" arch)
    set(${out}_${name}_HEAD_DIM "${CMAKE_MATCH_4}" PARENT_SCOPE)
    set(${out}_${name}_HEAD_DIM_V "${CMAKE_MATCH_5}" PARENT_SCOPE)
    set(${out}_${name}_TILE_M "${CMAKE_MATCH_6}" PARENT_SCOPE)
    set(${out}_${name}_TILE_N "${CMAKE_MATCH_7}" PARENT_SCOPE)
    set(${out}_${name}_WARPS "${CMAKE_MATCH_8}" PARENT_SCOPE)
    set(${out}_${name}_PTXAS "${CMAKE_MATCH_9}" PARENT_SCOPE)
    list(APPEND names "${name}")
    set(${out}_${name}_DIRECTION "${direction}" PARENT_SCOPE)
    set(${out}_${name}_ARCH "${arch}" PARENT_SCOPE)
    set(${out}_${name}_LINE "${line}" PARENT_SCOPE)
  endforeach()
  set(${out} "${names}" PARENT_SCOPE)
endfunction()

# Sets <out> to what nvcc.flags says of <name>, a list.
function(cute_attention_read_flags name out)
  file(STRINGS "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../src/kernels/nvcc.flags" line REGEX "^${name} ")
  separate_arguments(words UNIX_COMMAND "${line}")
  list(POP_FRONT words)
  set(${out} "${words}" PARENT_SCOPE)
endfunction()

# Sets <out> to the N of all WGMMAs of the sm90 row <name>, which cute_attention_read_rows() has read
# into `rows`.
function(cute_attention_row_wgmma name out)
  set(row rows_${name})
  set(columns ${${row}_TILE_N} ${${row}_HEAD_DIM_V})  # of S and O
  if(${row}_DIRECTION STREQUAL "backward")
    # Of S^T and dK, and of dQ: its columns are divided among warpgroups where there are more of them
    # than blocks of 64 queries.
    math(EXPR parts "(${${row}_WARPS} / 4 - 1) * 64 / ${${row}_TILE_M}")
    if(parts LESS 1)
      set(parts 1)
    endif()
    math(EXPR part "${${row}_HEAD_DIM} / ${parts}")
    list(APPEND columns ${${row}_TILE_M} ${${row}_HEAD_DIM} ${part})
  endif()
  set(${out} "${columns}" PARENT_SCOPE)
endfunction()

# Sets <out> to the compile options of one instance, beside those that all kernels have. <name> is
# the instance. <ptxas> is a list with the column `ptxas` of each of its rows. <wgmma> is a list
# with the N of each of its WGMMAs; it is empty for kernels that have none.
function(cute_attention_instance_options name ptxas wgmma out)
  set(options)
  list(REMOVE_DUPLICATES ptxas)
  if(NOT ptxas MATCHES "^O[0-3]$")
    message(FATAL_ERROR "src/kernels: the rows of ${name} differ in dtype alone and are compiled together, so the "
      "column ptxas must have one value for all of them: it has ${ptxas}")
  endif()
  if(NOT ptxas STREQUAL "O3")  # the level that ptxas uses without an option
    list(APPEND options "-Xptxas=-${ptxas}")
  endif()
  cute_attention_read_flags(wgmma defined)
  list(REMOVE_ITEM wgmma ${defined})
  if(wgmma)
    cute_attention_read_flags(other_wgmma flags)
    list(APPEND options ${flags})
  endif()
  set(${out} "${options}" PARENT_SCOPE)
endfunction()
