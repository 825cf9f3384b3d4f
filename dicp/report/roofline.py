"""What the machine reaches: the time of a copy by its bytes, and FLOP/s of matrix products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dicp.machine import processor, running
from dicp.report.dump import Program
from dicp.report.rates import copy_seconds, product_rate

_COPIED = tuple(1 << shift for shift in range(12, 29, 2))
"""Bytes of the tensors that are copied: from the smallest cache to main memory."""
_LIMITING = ("float64", "float32", "bfloat16", "float16")
"""Dtypes whose operations have a measured rate."""


@dataclass(frozen=True)
class Roofline:
    """The least time of a kernel on this machine; without measurements, of none.

    copies: bytes moved (read and written) and seconds, rising. rates: FLOP/s by dtype.
    obstacle: why there are none.
    """

    device: str = ""
    processor: str = ""
    threads: int = 0
    load: float = 0.0
    """Processes that wanted to run while the times were taken or the rates measured, the larger of
    both; less the threads that were meant to."""
    copies: Sequence[tuple[int, float]] = ()
    rates: Mapping[str, float] = field(default_factory=dict)
    obstacle: str = ""

    @classmethod
    def measure(cls, programs: Sequence[Program]) -> Roofline:
        """Measure what the timed steps of `programs` need, on the machine that they ran on."""
        if not programs:
            return cls(obstacle="no kernel was timed")
        times = programs[0].times
        device = torch.device(times["device"])
        try:
            found = processor(device)
        except (RuntimeError, AssertionError):  # PyTorch has no such device here
            found = f"no {device.type}"
        if found != times["processor"]:
            there = f"the times were taken on {times['processor']}, and this is {found}"
            return cls(obstacle=f"{there}: its rates would say nothing about them")
        before = torch.get_num_threads()
        torch.set_num_threads(times["threads"])
        try:
            copies = [(2 * size, copy_seconds(size, device)) for size in _COPIED]
            dtypes = {t["dtype"] for p in programs for t in p.record["tensors"]}
            rates = {
                name: product_rate(getattr(torch, name), device)
                for name in _LIMITING
                if name in dtypes
            }
        finally:
            torch.set_num_threads(before)
        load = max(running(), *(p.times["load"] for p in programs)) - times["threads"]
        return cls(str(device), found, times["threads"], max(load, 0.0), copies, rates)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the largest copy."""
        moved, seconds = self.copies[-1]
        return moved / seconds

    def copy_seconds(self, moved: float) -> float:
        """The time of a copy that moves as many bytes, between the measured ones."""
        if moved <= 0:
            return 0.0
        if moved >= self.copies[-1][0]:
            return moved / self.bandwidth
        if moved <= self.copies[0][0]:  # a shorter copy takes the call alone
            return self.copies[0][1]
        for (low, fast), (high, slow) in itertools.pairwise(self.copies):
            if moved <= high:
                share = math.log(moved / low) / math.log(high / low)
                return fast * (slow / fast) ** share
        raise AssertionError("a copy between the smallest and the largest")

    def limit(self, moved: float, flops: float | None, dtype: str) -> tuple[float, str]:
        """The least seconds for so many bytes and operations, and which of both takes them."""
        copy = self.copy_seconds(moved)
        compute = (flops or 0) / self.rates[dtype] if dtype in self.rates else 0.0
        return (compute, "FLOPs") if compute > copy else (copy, "bytes")
