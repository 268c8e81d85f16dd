"""What is compiled, as Python sees it: the C++ core, the torch binding, the tables of kernels."""
