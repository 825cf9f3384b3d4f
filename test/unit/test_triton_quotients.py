"""Quotients by what is known of, and sums of exponentials: right where something is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compare import assert_matches
from dicp.dynamo_bridge.backend import Backend


@pytest.mark.parametrize("fn", [F.silu, torch.sigmoid])
def test_quotients_by_one_and_more_are_right_at_the_ends(fn: Any, tmp_path: Path) -> None:
    ends = [math.inf, -math.inf, math.nan, 0.0, -0.0, 3e38, -3e38, 1e-40, -86.0, 17.0]
    x = torch.cat([torch.linspace(-86, 110, 2001), torch.tensor(ends)])
    torch._dynamo.reset()
    got = torch.compile(fn, backend=Backend("triton", cache_dir=tmp_path))(x)
    assert_matches(got, fn(x), fn(x.double()))
    tail, wanted = got[-len(ends) :], fn(x)[-len(ends) :]
    assert torch.equal(tail.isnan(), wanted.isnan())
    numbers = ~wanted.isnan()
    assert torch.equal(tail[numbers].signbit(), wanted[numbers].signbit())


def test_quotients_by_the_largest_numbers(tmp_path: Path) -> None:
    def work(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return a / (1 + x.exp())

    x = torch.linspace(87.4, 88.7, 101)
    torch._dynamo.reset()
    compiled = torch.compile(work, backend=Backend("triton", cache_dir=tmp_path))
    for a in (torch.full_like(x, 1e20), torch.full_like(x, -3e38)):
        assert_matches(
            compiled(a, x) / a[0], work(a, x) / a[0], work(a.double(), x.double()) / a[0]
        )


@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax, torch.logsumexp])
@pytest.mark.parametrize("width", [500, 20000])
def test_rows_with_infinite_elements(fn: Any, width: int, tmp_path: Path) -> None:
    """In one block and block after block, numbers before and after what is infinite."""
    low, high = -math.inf, math.inf
    x = torch.randn(7, width, generator=torch.Generator().manual_seed(0)) * 5
    x[0, 7], x[1, 9], x[2], x[3, ::2] = math.nan, high, low, low
    x[4, : width // 2], x[5, width // 2 :], x[6, [3, -3]] = low, low, high
    torch._dynamo.reset()
    got = torch.compile(fn, backend=Backend("triton", cache_dir=tmp_path))(x, -1)
    eager, truth = fn(x, -1), fn(x.double(), -1)
    assert torch.equal(got.isnan(), eager.isnan()) and torch.equal(got.isinf(), eager.isinf())
    for k in (3, 4, 5):
        assert_matches(got[k], eager[k], truth[k])


def test_sums_that_may_be_tiny_or_huge_are_divided_by_exactly(tmp_path: Path) -> None:
    def work(x: torch.Tensor) -> torch.Tensor:
        e = x.exp()
        return e / e.sum(-1, keepdim=True)

    x = torch.tensor([[-95.0], [86.0], [0.0]]) + torch.linspace(0, 1, 48)
    torch._dynamo.reset()
    got = torch.compile(work, backend=Backend("triton", cache_dir=tmp_path))(x)
    assert_matches(got, work(x), work(x.double()))
