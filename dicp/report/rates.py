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
    found: list[Callable[[], Any]] = [lambda: a @ a]
    if device.type == HOST and dtype != torch.float64 and torch.backends.mkldnn.is_available():
        linear = torch.ops.mkldnn._linear_pointwise
        found.append(lambda: linear(a, a, None, "none", [], ""))
    return found


def _attempts(products: Iterable[Callable[[], Any]], device: torch.device) -> Iterable[float]:
    for product in products:
        try:
            yield fastest(product, device)
        except RuntimeError:  # the library lacks the dtype on this processor
            continue


def fastest(fn: Callable[[], Any], device: torch.device) -> float:
    """The fastest of several calls, in seconds; short ones are taken several at a time."""
    timed(fn, device)
    once = timed(fn, device)
    calls = max(1, round(_SAMPLE / max(once, 1e-7)))
    rounds = max(3, round(_SECONDS / max(once * calls, 1e-7)))
    return min(timed(fn, device, calls) for _ in range(rounds))


def timed(fn: Callable[[], Any], device: torch.device, calls: int = 1) -> float:
    """Seconds per call, of `calls` calls in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish what it was given."""
    if device.type != HOST:
        torch.get_device_module(device).synchronize(device)
