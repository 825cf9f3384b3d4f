"""Sums along a row of what is not zero at one place: values of the row, without a loop over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recorder import TritonRecorder, record
from torch import Tensor

from dicp.compare import assert_matches
from dicp.dynamo_bridge.backend import Backend


def picked(value: Tensor, place: Tensor, width: Tensor, first: int = 0) -> Tensor:
    hit = torch.arange(first, first + width.shape[0]) == place[:, None]
    return torch.where(hit & (value[:, None] > -2), value[:, None], 0.0).sum(-1)


@pytest.mark.parametrize("width", [7, 20000])
@pytest.mark.parametrize("first", [0, 3])
def test_places_inside_and_outside(width: int, first: int, dynamic: bool, tmp_path: Path) -> None:
    ends = [0, first - 1, first, first + 1, first + width - 1, first + width, first + width + 1]
    place = torch.tensor([*ends, -100, first + 2])
    value, row = torch.arange(-4.0, 5.0), torch.empty(width)
    torch._dynamo.reset()
    run = torch.compile(picked, backend=Backend("triton", cache_dir=tmp_path), dynamic=dynamic)
    assert torch.equal(run(value, place, row, first), picked(value, place, row, first))


def loss(x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(x, classes, ignore_index=2)


@pytest.mark.parametrize("width", [300, 40000])
def test_gradients_of_cross_entropy(width: int, tmp_path: Path) -> None:
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    classes = torch.tensor([0, width - 1, 2, width // 2, 1])
    found = []
    for run, wide in ((torch.compile(loss, backend=Backend("triton", cache_dir=tmp_path)), x),
                      (loss, x), (loss, x.double())):  # fmt: skip
        leaf = wide.clone().requires_grad_()
        run(leaf, classes).backward()
        found.append(leaf.grad)
    assert_matches(*found)


@pytest.mark.parametrize("width", [1024, 50304])
def test_the_gradient_of_cross_entropy_sums_nothing_up(width: int) -> None:
    x = torch.zeros(512, width, dtype=torch.bfloat16).requires_grad_()
    *_, backward = record(loss, x, torch.zeros(512).long(), target=TritonRecorder()).programs
    assert not any("d.sum(" in text for text in backward.kernel_texts.values())
