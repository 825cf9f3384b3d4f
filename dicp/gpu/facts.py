"""Hardware properties of a GPU that block sizes, split reductions and launches depend on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """Hardware properties from the vendor's documentation; each target defines one instance."""

    lanes: int
    """Threads of a warp (wavefront): 32 or 64."""
    multiprocessors: int
    """Multiprocessors of a large chip of the family; block sizes are chosen to keep all busy."""
    programs_per_multiprocessor: int
    """Thread blocks per multiprocessor that suffice to hide each other's latency."""
    prefetch_bytes: int
    """Bytes of shared memory a program may prefetch into with two programs per multiprocessor."""
    atomic_dtypes: frozenset[torch.dtype]
    """Types that have atomic operations with the result that PyTorch defines."""
    line_bytes: int = 128
    """Bytes of a cache line; loads of whole lines waste no bandwidth."""

    @property
    def enough_programs(self) -> int:
        """Programs that keep every multiprocessor busy."""
        return self.multiprocessors * self.programs_per_multiprocessor
