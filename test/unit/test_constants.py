"""Constants: a number and a dtype, of one meaning in every pass, rule and language."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.dtypes import converted, holds_all, shortest

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SPECIAL = (0.0, -0.0, math.inf, -math.inf, 65519.9, 65520.0, 3.4028235e38, 3.4028236e38, 1e-310,
           6e-8, 2.9e-8, 0.1, 1.00390625, True, 255, -1)  # fmt: skip


def numbers() -> list[Any]:
    draw = random.Random(0)
    scaled = [draw.gauss(0, 1) * 10 ** draw.uniform(-50, 50) for _ in range(500)]
    return [*SPECIAL, *scaled, *(draw.randint(-(2**40), 2**40) for _ in range(500))]


@pytest.mark.parametrize("dtype", (*FLOATS, *INTS, torch.bool), ids=str)
def test_numbers_are_converted_as_tensors_are(dtype: torch.dtype) -> None:
    for number in numbers():
        held = converted(number, dtype)
        if held is None:  # out of range, or rounded twice
            assert dtype in (*INTS, torch.float16, torch.bfloat16, torch.float32)
            continue
        wide = torch.float64 if isinstance(number, float) else torch.int64
        expected = torch.tensor(number, dtype=wide).to(dtype).item()
        assert held == expected and math.copysign(1, held) == math.copysign(1, expected), number
        if dtype in FLOATS:
            kept = torch.float32 if dtype != torch.float64 else dtype
            assert converted(float(shortest(held, dtype)), kept) == held


def test_numbers_without_an_equal_are_left_to_the_machine() -> None:
    assert converted(300.5, torch.uint8) is None and converted(math.nan, torch.int64) is None
    assert converted(300, torch.uint8) == 44 and converted(-1, torch.uint8) == 255
    assert math.isnan(converted(math.nan, torch.bfloat16) or 0.0)
    assert converted(1.0, torch.complex64) is None


def test_conversions_that_lose_nothing() -> None:
    """Every value of the dtypes of at most 16 bits; some pairs of wider ones."""
    for source in (*INTS[:3], *FLOATS[:2], torch.float8_e4m3fn, torch.float8_e5m2):
        bits = torch.int8 if source.itemsize == 1 else torch.int16
        info = torch.iinfo(bits)
        every = torch.arange(info.min, info.max + 1).to(bits).view(source)
        for target in (*INTS, *FLOATS):
            there = every.to(target).double()
            same = torch.equal(there.nan_to_num(0.5), every.double().nan_to_num(0.5))
            to_integers = source.is_floating_point and not target.is_floating_point
            assert holds_all(source, target) == (same and not to_integers), (source, target)
    assert holds_all(torch.bool, torch.uint8) and not holds_all(torch.uint8, torch.bool)
    assert holds_all(torch.int32, torch.float64) and not holds_all(torch.int32, torch.float32)
    assert not holds_all(torch.int64, torch.float64) and not holds_all(torch.float64, FLOATS[2])


def filled(x: Tensor) -> list[Tensor]:
    def full(number: Any, dtype: torch.dtype) -> Tensor:
        return torch.full((3,), number, dtype=dtype)

    half, brain = torch.float16, torch.bfloat16
    return [
        x + full(-1, torch.uint8).to(torch.int32),
        x + full(0.5, torch.int64),
        x + full(-2.7, torch.int32),
        x + full(0.1, brain).float(),
        x + full(1e-10, half).float() * 1e10,
        x / full(1e-10, half),
        x.double() + full(0.1, torch.float32).double(),
        x * full(1e-50, torch.float32) * 1e38,
        x + full(0.1, brain).to(half).to(torch.float64),
        x + torch.scalar_tensor(0.1, dtype=brain).float() * 1000,
        torch.fill(x.bfloat16(), 0.1).float() * 1000,
        torch.full_like(x, 0.1, dtype=half).float() * 1000,
        x.new_full((3,), -1, dtype=torch.uint8).int(),
        torch.arange(0, 1, 0.1, dtype=brain).float() * 1000 + x[0],
    ]


def chosen(x: Tensor, u: Tensor) -> list[Tensor]:
    b = x.bfloat16()
    tenth = torch.full_like(b, 0.1)
    return [
        torch.where(u > 1, u, -1).int(),
        u.masked_fill(u > 1, -1).int(),
        u.index_fill(0, torch.tensor([1]), -1).int(),
        torch.where(b > 0, b, 0.1).float() * 1000,
        b.masked_fill(b > 0, 0.1).float() * 1000,
        F.pad(b, (1, 1), value=0.1).float() * 1000,
        b.clamp(0.1, 0.3).float() * 1000,
        F.threshold(b, 0.1, 0.3).float() * 1000,
        torch.nan_to_num(b / 0, nan=0.1, posinf=0.3, neginf=-0.7).float() * 1000,
        b.scatter(0, torch.tensor([1]), 0.1).float() * 1000,
        torch.stack([tenth == 0.1, tenth < 0.1, tenth >= 0.1, tenth != 0.1]),
    ]


def truths(u: Tensor) -> list[Tensor]:
    few = u > 1
    return [~few.any(), ~few.all(), ~few.view(1, -1).any(1), torch.isin(2, u, invert=True),
            torch.isin(u, 2, invert=True), few.any().float() - 1]  # fmt: skip


@pytest.mark.parametrize("backend", ["cpugraph", "tritongraph", "ascendgraph"])
def test_compiled_constants_are_those_of_eager(backend: str) -> None:
    x, u = torch.tensor([1.0, -2.0, 0.25]), torch.tensor([1, 2, 255], dtype=torch.uint8)
    for fn, inputs in ((filled, (x,)), (chosen, (x, u)), (truths, (u,))):
        found = torch.compile(fn, backend=backend, dynamic=False)(*inputs)
        for k, (ours, theirs) in enumerate(zip(found, fn(*inputs), strict=True)):
            message = f"{fn.__name__} {k}: {ours} is not {theirs}"
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=0, equal_nan=True), message
