"""Rewrites of loop graphs and kernels."""
