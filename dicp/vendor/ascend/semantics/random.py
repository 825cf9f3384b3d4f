"""Random numbers from a key and a counter: equal keys give equal numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dicp.graphop.interpreter import Semantics
from dicp.graphop.rules.creation import PHILOX


def _generator(key: Tensor, counter: Tensor) -> torch.Generator | None:
    """A generator for this key; None while shapes are inferred."""
    if type(key) is not Tensor or key.is_meta:
        return None
    numbers = [int(k) for k in [*key.view(torch.int64), *counter.view(torch.int64)]]
    seed = 0
    for number in numbers:
        seed = (seed * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


def _drawn(
    draw: Callable[..., Tensor], shape: list[int], key: Tensor, counter: Tensor, dtype: Any
) -> Tensor:
    generator = _generator(key, counter)
    if generator is None:  # an overload of its own, which takes symbolic sizes
        return draw(shape, dtype=dtype)
    return draw(shape, generator=generator, dtype=dtype)


def uniform(shape: list[int], key: Tensor, counter: Tensor, alg: int, dtype: Any) -> Tensor:
    """Uniform in [0, 1)."""
    assert alg == PHILOX
    return _drawn(torch.rand, shape, key, counter, dtype)


def normal(shape: list[int], key: Tensor, counter: Tensor, alg: int, dtype: Any) -> Tensor:
    """Standard normal."""
    assert alg == PHILOX
    return _drawn(torch.randn, shape, key, counter, dtype)


def register(semantics: Semantics) -> None:
    semantics.op("StatelessRandomUniformV2", host=("shape", "alg"))(uniform)
    semantics.op("StatelessRandomNormalV2", host=("shape", "alg"))(normal)
