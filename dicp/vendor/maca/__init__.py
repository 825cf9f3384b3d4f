"""MetaX GPUs, programmed in MACA C++."""

from dicp.vendor.maca.target import MacaTarget

__all__ = ["MacaTarget"]
