"""NVIDIA GPUs through generated Triton kernels."""

from dicp.vendor.triton.target import TritonTarget

__all__ = ["TritonTarget"]
