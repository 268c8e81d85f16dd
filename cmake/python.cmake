# python.cmake: finds the folders of Python packages. It asks the Python that builds this package,
# without importing them.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

# Sets <out> to the folder of the package <name>, or to "" if Python cannot find it.
function(cute_attention_find_python_package name out)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "from importlib.util import find_spec as f
s = f('${name}')
print(list(s.submodule_search_locations)[0] if s else '')"
    OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()
