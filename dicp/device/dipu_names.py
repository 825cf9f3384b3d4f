"""DIPU's names of the device's classes, for programs and vendors' packages that use them.

`DIPUStream`, `DIPUEvent` and `DIPUGuard` (a context in which another device is the current one) are
those of `torch.dipu`. `ProcessGroupDICL` is the process group of the backend `dicl`.
"""

from __future__ import annotations

from typing import Any

import torch

from dicp.device.active import dipu
from dicp.device.distributed import ProcessGroupDICL
from dicp.device.module import Event as DIPUEvent
from dicp.device.module import Stream as DIPUStream
from dicp.device.module import as_device
from dicp.device.module import device as DIPUGuard

__all__ = [
    "DIPUAllocator", "DIPUEvent", "DIPUGenerator", "DIPUGuard", "DIPUStream", "ProcessGroupDICL",
]  # fmt: skip


class DIPUGenerator(torch.Generator):
    """The state of random draws on a device; without one, on the current device."""

    def __new__(cls, device: Any = None) -> DIPUGenerator:
        return super().__new__(cls, as_device(device))


class DIPUAllocator:
    """The memory of a device, with the algorithm of DIPU_DEVICE_MEMCACHING_ALGORITHM; without a
    device, that of the current one."""

    def __init__(self, device: Any = None) -> None:
        self.device = as_device(device)

    def allocate(self, size: int, stream: torch.Stream | None = None) -> int:
        """The address of `size` bytes for work on `stream`. Raises torch.OutOfMemoryError."""
        return dipu.caching_allocator_alloc(size, self.device, stream)

    def free(self, address: int) -> None:
        """Frees what `allocate` gave. Raises RuntimeError for a double free."""
        dipu.caching_allocator_delete(address)

    def empty_cache(self) -> None:
        """Gives free memory of every device back to its runtime."""
        dipu.empty_cache()

    @property
    def allocated(self) -> int:
        """Bytes in use."""
        return dipu.memory_allocated(self.device)

    @property
    def reserved(self) -> int:
        """Bytes taken of the runtime, in use or free."""
        return dipu.memory_reserved(self.device)
