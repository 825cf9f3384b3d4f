"""Clocks: alternating samples of several functions, and what the machine itself can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from dicp.report.rates import copy_seconds, fastest, product_rate, timed

COPIED = 256 << 20
"""Bytes, far more than the caches hold."""
SHORTEST_SAMPLE = 2e-3
"""Seconds; a faster function is called several times per sample."""


@dataclass(frozen=True)
class Sample:
    """Seconds per call: the median and the quartiles of `count` samples."""

    median: float
    low: float
    high: float
    count: int


def summarize(seconds: list[float]) -> Sample:
    """The median and quartiles of at least one sample."""
    if len(seconds) == 1:
        return Sample(seconds[0], seconds[0], seconds[0], 1)
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Sample(median, low, high, len(seconds))


def alternate(
    fns: Mapping[str, Callable[[], Any]], seconds: float, device: str = "cpu"
) -> dict[str, Sample]:
    """Sample the functions in turn, so that what disturbs the machine disturbs all of them alike.

    Every function gets the same number of samples: 5 to 200, as many as fit into `seconds` each.
    """
    place, calls, longest = torch.device(device), {}, 0.0
    for name, fn in fns.items():
        fn()
        once = min(timed(fn, place), timed(fn, place))
        calls[name] = max(1, round(SHORTEST_SAMPLE / max(once, 1e-7)))
        longest = max(longest, once * calls[name])
    rounds = min(200, max(5, round(seconds / longest)))
    samples: dict[str, list[float]] = {name: [] for name in fns}
    for turn in range(rounds):
        names = list(fns)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(timed(fns[name], place, calls[name]))
    return {name: summarize(taken) for name, taken in samples.items()}


def convolution_rate(dtype: torch.dtype, device: str = "cpu") -> float:
    """FLOP/s of a 3 by 3 convolution with 64 channels, in the faster of both memory formats."""
    batch, side = (4, 56) if device == "cpu" else (128, 56)
    image = torch.randn(batch, 64, side, side, device=device, dtype=dtype)
    weight = torch.randn(64, 64, 3, 3, device=device, dtype=dtype)
    last = [t.contiguous(memory_format=torch.channels_last) for t in (image, weight)]
    formats = ((image, weight), (last[0], last[1]))
    place = torch.device(device)
    with torch.no_grad():
        seconds = min(fastest(lambda f=f: F.conv2d(*f, padding=1), place) for f in formats)
    return 2 * batch * side * side * 64 * 64 * 9 / seconds


@dataclass(frozen=True)
class Rates:
    """What the machine reaches: FLOP/s of its libraries and bytes per second of a copy."""

    matmul: float
    convolution: float
    copy: float

    @classmethod
    def measure(cls, dtype: torch.dtype, device: str) -> Rates:
        place = torch.device(device)
        copy = 2 * COPIED / copy_seconds(COPIED, place)
        return cls(product_rate(dtype, place), convolution_rate(dtype, device), copy)

    def limit(self, flops: Mapping[str, float], moved: float) -> float:
        """Seconds that a step needs at least: its library FLOPs and its unavoidable bytes."""
        return (
            flops["matmul"] / self.matmul
            + flops["convolution"] / self.convolution
            + moved / self.copy
        )
