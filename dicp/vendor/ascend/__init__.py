"""Huawei Ascend NPUs through CANN's graph engine (GE) and runtime (ACL)."""

from dicp.vendor.ascend.target import AscendTarget

__all__ = ["AscendTarget"]
