"""Which library runs the linear layers: measured, once per machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dicp.cache import Cache
from dicp.config import Config
from dicp.vendor.cpu import library


def test_rates_are_measured_on_real_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compilation runs under a mode in which tensors compute nothing."""
    seen: list[Tensor] = []

    def product(x: Tensor, w: Tensor) -> Tensor:
        seen.append(x @ w.t())
        return seen[-1]

    monkeypatch.setattr(library, "linear_libraries", lambda: {"one": product, "other": product})
    cache = Cache.open(Config(cache_dir=tmp_path))
    with FakeTensorMode():
        rates = library.linear_rates(cache)
        assert library.linear_rates(cache) == rates, "the second time they are read"
    assert len(seen) == 2 * library.ROUNDS
    assert not any(isinstance(y, FakeTensor) for y in seen)
    assert all(torch.isfinite(y).all() for y in seen)


def test_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "measure_linear", lambda dtype: {"slow": 1.0, "fast": 2.0})
    assert library.fastest_linear(Cache.open(Config(cache_dir=tmp_path))) == "fast"
