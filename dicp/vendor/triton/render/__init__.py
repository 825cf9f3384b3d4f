"""Triton code of loop kernels."""
