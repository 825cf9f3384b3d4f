"""Times of calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def median_seconds(call: Callable[[], object], device: str, warmup: int, runs: int) -> float:
    """The median time of `runs` calls (at least one), each waited for, after `warmup` others."""
    wait = torch.get_device_module(device).synchronize
    seconds = []
    for _ in range(warmup + max(runs, 1)):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[warmup:])
