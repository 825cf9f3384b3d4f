"""MACA C++ of loop kernels."""
