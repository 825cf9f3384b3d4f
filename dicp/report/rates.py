"""How fast this machine copies and multiplies, by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dicp.torch_private import HOST

_SECONDS, _SAMPLE = 0.2, 5e-4
"""How long a copy or a product is repeated, and how long a sample is at least; the fastest counts.
A long sample would more often be interrupted by other processes."""


def copy_seconds(size: int, device: torch.device) -> float:
    """The time of a copy of `size` bytes, which moves twice as many."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return fastest(lambda: target.copy_(source), device)


def product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest square product in the libraries that PyTorch carries."""
    sizes = (512, 1024) if device.type == HOST else (4096, 8192)
    return max(2 * size**3 / min(_attempts(_products(size, dtype, device), device))
               for size in sizes)  # fmt: skip


def _products(size: int, dtype: torch.dtype, device: torch.device) -> list[Callable[[], Any]]:
    a = torch.randn(size, size, device=device).to(dtype)
    ways: list[Callable[[], Any]] = [lambda: a @ a]
    if device.type == HOST and dtype != torch.float64 and torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        ways.append(lambda: linear(a, a, None, "none", [], ""))
    return ways


def _attempts(ways: Iterable[Callable[[], Any]], device: torch.device) -> Iterable[float]:
    for way in ways:
        try:
            yield fastest(way, device)
        except RuntimeError:  # the library lacks the dtype on this processor
            continue


def fastest(fn: Callable[[], Any], device: torch.device) -> float:
    """The fastest of several calls, in seconds; short ones are taken several at a time."""

    def timed(calls: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        _wait(device)
        return (time.perf_counter() - start) / calls

    timed(1)
    once = timed(1)
    calls = max(1, round(_SAMPLE / max(once, 1e-7)))
    rounds = max(3, round(_SECONDS / max(once * calls, 1e-7)))
    return min(timed(calls) for _ in range(rounds))


def _wait(device: torch.device) -> None:
    if device.type != HOST:
        torch.get_device_module(device).synchronize(device)
