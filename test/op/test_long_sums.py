"""Long sums of equal numbers: rounding errors of additions one after another do not cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.compare import Rule, check_tensor

N = 2048
VALUES = (0.3, 0.6931472, 0.7654321)
EACH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of_elements": lambda x: x + 0,
    "of_remainders": lambda x: torch.remainder(x, 0.29),
    "of_lgamma": lambda x: x.lgamma(),
    "of_sines_where": lambda x: torch.where(x > 0.2, x.sin(), x),
    "of_read_indices": lambda x: x[torch.arange(N) % 7],
    "of_checked_indices": lambda x: x[(x * 10).long()],
    "of_random_numbers": lambda x: x + torch.randn_like(x) * 0,
    "of_float64": lambda x: x.double().exp(),
    "of_short_rows": lambda x: x.view(128, 16)[1:, 1:],
    "of_windows": lambda x: x.unfold(0, 3, 1)[:600],
    "of_few_columns": lambda x: torch.as_strided(x, (2, 32, 16), (600, 17, 1)),
}


def sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(), x.square().sum()


@pytest.mark.parametrize("name", EACH)
def test_sum(name: str, backend_name: str) -> None:
    function = EACH[name]

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sums(function(x))

    compiled = torch.compile(program, backend=backend_name, fullgraph=True)
    elements = torch.compile(function, backend=backend_name, fullgraph=True)
    for value in VALUES:
        x = torch.full((N,), value)
        given = elements(x)
        found = zip(compiled(x), sums(given), sums(given.double()), strict=True)
        for got, eager, real in found:
            assert not check_tensor(got, eager, real, Rule())


@pytest.mark.parametrize("rows", [37, 63, 64, 250])
def test_sum_of_columns(rows: int, backend_name: str, dynamic: bool) -> None:
    """Of numbers far from zero: the mean is what deviations are taken from."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(0), x - x.mean(0)

    torch.manual_seed(rows)
    x = torch.randn(rows, 33) + 1000
    compiled = torch.compile(program, backend=backend_name, dynamic=dynamic, fullgraph=True)
    for got, eager, real in zip(compiled(x), program(x), program(x.double()), strict=True):
        ours, theirs = (float((y.double() - real).abs().mean()) for y in (got, eager))
        assert ours <= 1.5 * theirs


def test_mean_beside_random_numbers(backend_name: str) -> None:
    def loss(x: torch.Tensor) -> Any:
        return F.soft_margin_loss(torch.randn(x.shape).abs() * 0, torch.ones_like(x))

    x = torch.rand(33, 33)
    got = torch.compile(loss, backend=backend_name, fullgraph=True)(x)
    assert not check_tensor(got, loss(x), torch.tensor(2.0).double().log(), Rule())


def norms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    images = x.view(4, 8, 32, 32)
    rows = F.layer_norm(x, (4096,)) + F.layer_norm(x.abs().sqrt(), (4096,))
    return (
        F.batch_norm(images, None, None, training=True),
        rows,
        F.layer_norm(x.flip(1), (4096,)),
        x.view(4, 32, 4, 64).square().sum((1, 3)),
        x.view(4096, 8).var(0),
    )


def test_elements_beside_far_larger_ones(backend_name: str) -> None:
    """Where a partial sum has a far larger element, each addition rounds to its precision, and
    equal elements round alike."""
    x = 50 + torch.randn(8, 4096)
    x[:, -1], x[:, 1000] = 1e5, 1e5
    results = torch.compile(norms, backend=backend_name, fullgraph=True)(x)
    errors = zip(results, norms(x), norms(x.double()), strict=True)
    for place, (got, eager, real) in enumerate(errors):
        largest = real.abs().max()
        floor = 4 * torch.finfo(torch.float32).eps * largest
        assert (got - real).abs().max() <= 2 * (eager - real).abs().max() + floor, place
