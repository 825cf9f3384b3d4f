"""What block sizes, splits and launches depend on of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """A GPU in numbers, from its vendor's documentation; a target states them once."""

    lanes: int
    """Threads of a warp (a wave): 32 or 64."""
    multiprocessors: int
    """Of a large chip of the family: block sizes are chosen to keep so many busy."""
    programs_per_multiprocessor: int
    """Blocks of threads that hide each other's latency."""
    prefetch_bytes: int
    """Shared memory that a program may prefetch into where two share a multiprocessor."""
    atomic_dtypes: frozenset[torch.dtype]
    """Types whose values are combined in memory with the result that PyTorch defines."""
    line_bytes: int = 128
    """A line of the cache; loads of whole lines waste nothing."""

    @property
    def enough_programs(self) -> int:
        """Programs that keep every multiprocessor busy."""
        return self.multiprocessors * self.programs_per_multiprocessor
