"""Workspace planning: intermediates share one block, by lifetime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes of which buffers begin at a multiple: a cache line. A block has as many bytes more than its
buffers need, since its own address may be any."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes that is alive from step `start` to step `end`, both included."""

    key: int
    size: int
    start: int
    end: int


@dataclass(frozen=True)
class MemoryPlan:
    offsets: dict[int, int]
    total: int


def plan(lifetimes: Sequence[Lifetime]) -> MemoryPlan:
    """Offsets such that buffers alive at the same step do not overlap.

    Largest first, each at the lowest free offset (Pisarchyk and Lee, arXiv:2001.03288).
    """
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, Lifetime]] = []
    total = 0
    for item in sorted(lifetimes, key=lambda x: (-x.size, x.start)):
        size = -(-item.size // ALIGNMENT) * ALIGNMENT
        busy = sorted(
            (low, high)
            for low, high, other in placed
            if other.start <= item.end and item.start <= other.end
        )
        at = 0
        for low, high in busy:
            if low - at >= size:
                break
            at = max(at, high)
        offsets[item.key] = at
        placed.append((at, at + size, item))
        total = max(total, at + size)
    return MemoryPlan(offsets, total)
