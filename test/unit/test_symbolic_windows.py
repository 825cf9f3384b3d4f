"""Adaptive pooling of images of symbolic size and group norm of symbolic channels are compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dicp

pytestmark = pytest.mark.sweep

IMAGES = ((2, 3, 7, 9), (3, 2, 12, 8), (2, 4, 5, 3), (2, 2, 2, 2))  # 2 and 3: fewer than results


def average(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, (3, 4))


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = F.adaptive_max_pool2d(x, (2, 3), return_indices=True)
    return values, places


def grouped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight, bias)


def images() -> list[list[Tensor]]:
    return [[torch.randn(shape)] for shape in IMAGES]


def channels() -> list[list[Tensor]]:
    return [[torch.randn(2, c, 5, c + 1), torch.randn(c), torch.randn(c)] for c in (8, 12, 16)]


@pytest.mark.parametrize("target", ["cpu", "triton"])
@pytest.mark.parametrize(
    ("fn", "calls"), [(average, images), (largest, images), (grouped, channels)]
)
def test_symbolic_sizes_are_compiled(
    fn: Callable[..., Any], calls: Callable[[], list[list[Tensor]]], target: str
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    backend = dicp.Backend(target, cache=False)
    compiled = torch.compile(fn, backend=backend, dynamic=True)
    for inputs in calls():
        if fn is largest:
            inputs[0][0, 0, 0, 0] = inputs[0][1, 1, -1, -1] = math.nan
        given = [x.requires_grad_() for x in inputs]
        got, want = (
            out if isinstance(out, tuple) else (out,) for out in (compiled(*given), fn(*given))
        )
        torch.testing.assert_close(got, want, equal_nan=True)
        grad = torch.randn_like(want[0])
        torch.testing.assert_close(
            torch.autograd.grad(got[0], given, grad),
            torch.autograd.grad(want[0], given, grad),
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip
    assert all(report.counts["eager"] == 0 for report in backend.reports)
    assert len(backend.reports) == 2, "one forward and one backward graph for all sizes"


@pytest.mark.parametrize("target", ["cpu", "triton"])
def test_maximum_of_a_whole_image_is_compiled(target: str) -> None:
    torch._dynamo.reset()
    backend = dicp.Backend(target, cache=False)
    x = torch.randn(2, 3, 12, 13)
    torch.compile(lambda x: F.adaptive_max_pool2d(x, 1), backend=backend)(x)
    assert all(report.counts["eager"] == 0 for report in backend.reports)
