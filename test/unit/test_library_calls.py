"""The library calls of a step, and the implementations by which benchmarks time them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.library_calls import LibraryCalls, implementations

aten = torch.ops.aten


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def flipped(*shape: int) -> Tensor:
    return random(*shape).transpose(-1, -2)


ENDS = torch.tensor([3, 3, 10], dtype=torch.int32)  # the second group is empty

STEPS: dict[str, Callable[[], Tensor]] = {
    "product": lambda: random(5, 7) @ flipped(4, 7),
    "linear": lambda: F.linear(random(5, 7), random(4, 7), random(4)),
    "batch": lambda: random(3, 5, 7) @ flipped(3, 4, 7),
    "groups": lambda: F.grouped_mm(
        random(10, 16).bfloat16(), random(3, 16, 8).bfloat16(), offs=ENDS
    ),
    "pixels": lambda: F.conv2d(random(2, 6, 5, 4), random(8, 6, 1, 1), random(8)),
    "strided": lambda: F.conv2d(random(2, 6, 5, 4), random(8, 6, 1, 1), stride=2),
    "filters": lambda: F.conv2d(random(2, 6, 5, 4), random(8, 3, 3, 3), padding=1, groups=2),
    "row": lambda: F.conv1d(random(2, 6, 9), random(8, 6, 3)),
    "attention": lambda: F.scaled_dot_product_attention(*(random(2, 2, 8, 8) for _ in range(3))),
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls whose implementations were asked for, with the arguments they are timed with."""
    seen: list[Any] = []

    def watched(func: Any, args: Any, kwargs: Any) -> Any:
        seen.append((func, args, kwargs))
        return implementations(func, args, kwargs)

    monkeypatch.setattr("benchmarks.library_calls.implementations", watched)
    return seen


@pytest.mark.parametrize("name", STEPS)
def test_every_path_computes_what_the_call_does(name: str, taken: list[Any]) -> None:
    with LibraryCalls() as calls:
        (2 * STEPS[name]()).sum().backward()
    seconds = calls.seconds("cpu")
    assert len(taken) == len(seconds) >= 2, "the step and at least one gradient"
    assert all(s > 0 for s in seconds.values())
    for func, args, kwargs in taken:
        with torch.no_grad():
            first, *others = (f() for f in implementations(func, args, kwargs))
        for other in others:
            if isinstance(other, list):  # one product after another, none for an empty group
                kept = first[[0, 2]] if name == "groups" and first.dim() == 3 else first
                other, first = torch.cat(other).view_as(kept), kept
            torch.testing.assert_close(other, first, rtol=2e-2, atol=1e-4)


def test_a_call_made_twice_counts_twice_and_is_timed_once(taken: list[Any]) -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    with LibraryCalls() as calls:
        _ = a @ b, b @ a, a @ b.t()
    calls.seconds("cpu")
    assert sorted(calls.counts.values()) == [1, 2]
    assert len(taken) == 2
