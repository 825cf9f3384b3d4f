"""Rows that are swept in several blocks: what one block hands to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dicp.cache import Cache
from dicp.config import Config
from dicp.dynamo_bridge.backend import Backend
from dicp.vendor.triton import aot

pytestmark = pytest.mark.sweep

LENGTH = 20_000
INF, NAN = float("inf"), float("nan")


def reduced(fn: Callable[..., Any], x: Tensor, dynamic: bool, folder: Path) -> Any:
    """What `fn` gives when its rows are walked, block after block."""
    torch._dynamo.reset()
    backend = Backend("triton", cache_dir=folder)
    got = torch.compile(fn, backend=backend, dynamic=dynamic)(x)
    (report,), (program,) = (
        backend.reports,
        aot.stored_programs(Cache.open(Config(cache_dir=folder))),
    )
    assert all("for start in range" in text for text in program["texts"].values())
    assert not any(n.decision == "eager" for n in report.nodes)
    return got


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "any size"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float64, torch.bool], ids=str)
def test_running_sums_go_on_from_block_to_block(
    dtype: torch.dtype, symbolic: bool, tmp_path: Path
) -> None:
    x = torch.randint(-3, 4, (3, LENGTH)).to(dtype)
    assert torch.equal(reduced(lambda x: x.cumsum(1), x, symbolic, tmp_path), x.cumsum(1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64], ids=str)
def test_running_products_go_on_from_block_to_block(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.ones(2, LENGTH, dtype=dtype)
    x[:, ::3000] = -2
    assert torch.equal(reduced(lambda x: x.cumprod(1), x, False, tmp_path), x.cumprod(1))


def test_a_running_sum_that_is_not_a_number_stays_so(tmp_path: Path) -> None:
    x = torch.ones(2, LENGTH)
    x[0, 5000], x[1, 9000], x[1, 15000] = NAN, INF, -INF
    got = reduced(lambda x: x.cumsum(1), x, False, tmp_path)
    torch.testing.assert_close(got, x.cumsum(1), equal_nan=True)


def rows() -> Tensor:
    """Ties within a block, in one lane of two blocks and in two lanes; NaN; infinities."""
    x = torch.zeros(8, LENGTH)
    x[0, [700, 9000, 19000]] = 5  # the first of equals
    x[1, [19000, 300]] = -5
    x[2, [12000, 15000]] = NAN
    x[2, 100] = INF
    x[3] = -INF
    x[4] = INF
    x[5, 1:] = -INF
    x[6, LENGTH - 1] = 1
    x[7] = NAN
    return x


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "any size"])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_first_of_equals_is_found_and_nan_before_all(
    name: str, symbolic: bool, tmp_path: Path
) -> None:
    fn = getattr(torch, name)
    got = reduced(lambda x: (fn(x, 1), fn(x)), rows(), symbolic, tmp_path)
    assert torch.equal(got[0], fn(rows(), 1)) and torch.equal(got[1], fn(rows()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_the_first_of_equal_whole_numbers_is_found(dtype: torch.dtype, tmp_path: Path) -> None:
    low = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    x = torch.full((3, LENGTH), low, dtype=dtype)
    x[1, [4000, 8000]] = 1
    x[2] = 1
    x[2, 18000:] = low
    got = reduced(lambda x: (x.int().argmax(1), x.max(1), x.min(1)), x, False, tmp_path)
    assert torch.equal(got[0], x.int().argmax(1))
    for mine, theirs in zip((*got[1], *got[2]), (*x.max(1), *x.min(1)), strict=True):
        assert torch.equal(mine, theirs)
