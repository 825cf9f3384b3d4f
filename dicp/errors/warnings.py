"""All warnings."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CacheWarning", "DicpWarning", "FallbackWarning", "SerialWarning", "SimulatorWarning",
    "SpecializationWarning", "ToolWarning",
]  # fmt: skip


class DicpWarning(UserWarning):
    """Base of all warnings of dicp."""


class CacheWarning(DicpWarning):
    """The cache is degraded: an entry was rebuilt, or nothing is stored."""


class SerialWarning(DicpWarning):
    """The host's compiler has no OpenMP."""

    def __init__(self, compiler: str) -> None:
        super().__init__(
            f"{compiler} does not take -fopenmp: generated kernels run on one thread. Install its "
            "OpenMP runtime (Debian: apt install libomp-dev), or name another compiler in DICP_CXX."
        )


class SimulatorWarning(DicpWarning):
    """A simulator stands in for a device: its numerics count, its speed does not."""


class ToolWarning(DicpWarning):
    """An operator tool does less than it was asked for; the program continues."""


class SpecializationWarning(DicpWarning):
    """A graph is compiled for more sets of sizes than the cache holds."""

    def __init__(self, limit: int, symbols: Sequence[str]) -> None:
        self.limit = limit
        self.symbols = tuple(symbols)
        super().__init__(
            f"a graph has been compiled for more than {limit} values of the sizes "
            f"{', '.join(symbols)}; the least recently used programs are dropped and compiled "
            "again when their sizes return. Set shape_buckets (DICP_SHAPE_BUCKETS, DICP_GEARS) to "
            "the sizes that inputs may be padded to, or pad them yourself."
        )


class FallbackWarning(DicpWarning):
    """Something runs eagerly that would otherwise be compiled."""
