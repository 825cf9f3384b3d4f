"""The embedded default vendor: the host CPU."""

from dicp.vendor.cpu.target import CpuTarget

__all__ = ["CpuTarget"]
