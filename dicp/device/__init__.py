"""The eager device on PrivateUse1. Importing `dicp.device.active` registers it in the process.

Its classes have DIPU's names here, too; the first of these names that is read registers the device.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

DIPU_NAMES = (
    "DIPUAllocator", "DIPUEvent", "DIPUGenerator", "DIPUGuard", "DIPUStream", "ProcessGroupDICL",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in DIPU_NAMES:
        return getattr(import_module("dicp.device.dipu_names"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
