"""C++ text of loop kernels for the host."""
