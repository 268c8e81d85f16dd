# torch_binding.cmake: builds libcute_attention_torch.so on the LibTorch stable ABI, so that one
# binary serves every CPython and every torch >= 2.10. The library carries no path to torch: when it
# is loaded, Python has loaded torch already.
cute_attention_find_python_package(torch torch_package)
if(NOT torch_package)
  message(FATAL_ERROR "The torch binding needs torch >= 2.10 in ${Python_EXECUTABLE}; "
    "-DCUTE_ATTENTION_TORCH=OFF builds the C++ library alone.")
endif()

add_library(cute_attention_torch MODULE src/torch_binding.cpp)
target_compile_definitions(cute_attention_torch PRIVATE TORCH_TARGET_VERSION=0x020a000000000000)
target_include_directories(cute_attention_torch SYSTEM PRIVATE
  "${torch_package}/include" "${torch_package}/include/torch/csrc/api/include")
# libtorch.so has no code of its own, but needs libtorch_cpu, and libtorch_cuda if torch was built
# with CUDA. So a library that needs libtorch.so finds the symbols of both.
target_link_directories(cute_attention_torch PRIVATE "${torch_package}/lib")
target_link_libraries(cute_attention_torch PRIVATE cute_attention -Wl,--no-as-needed torch -Wl,--as-needed)
set_target_properties(cute_attention_torch PROPERTIES NO_SONAME ON INSTALL_RPATH "$ORIGIN")
if(CUTE_ATTENTION_EMULATED)
  target_compile_definitions(cute_attention_torch PRIVATE CUTE_ATTENTION_EMULATED)
endif()
cute_attention_lower_glibc(cute_attention_torch)
install(TARGETS cute_attention_torch LIBRARY DESTINATION lib)
