"""Reductions over rows shorter than a few vectors: tiles of rows, transposed in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import record
from torch import Tensor

from dicp.compare import assert_matches
from dicp.config import Config

Function = Callable[[Tensor], Any]
ANY_DTYPE: list[Function] = [
    lambda x: x.amax(-1), lambda x: x.argmax(-1), lambda x: x.argmin(-1),
    lambda x: tuple(x.max(-1)), lambda x: x.sum(-1), lambda x: (x > 0).any(-1),
    lambda x: (x > 0).all(-1), lambda x: x - x.amax(-1, keepdim=True),
    lambda x: (x == x.amax(-1, keepdim=True)).sum(-1),
]  # fmt: skip
FLOATING: list[Function] = [
    lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.mean(-1),
    lambda x: x.var(-1), lambda x: F.layer_norm(x, x.shape[-1:]), lambda x: x.logsumexp(-1),
    lambda x: F.normalize(x, dim=-1), lambda x: (x.softmax(-1) * x).sum(-1),
]  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8]


def layouts(x: Tensor) -> list[Tensor]:
    """Contiguous rows, some at odd addresses, rows of a larger matrix, and rows apart."""
    rows, length = x.shape
    wide, tall = x.new_zeros(rows, length + 3), x.new_zeros(2 * rows, length)
    odd = x.new_zeros(rows * length + 1)
    wide[:, 1 : length + 1], tall[::2], odd[1:] = x, x, x.flatten()
    return [x, odd[1:].view(rows, length), wide[:, 1 : length + 1], tall[::2],
            torch.stack([x, x + x], 1)]  # fmt: skip


def inputs(dtype: torch.dtype, rows: int, length: int) -> Tensor:
    x = torch.randint(-5, 5, (rows, length)).to(dtype)
    if dtype.is_floating_point:
        x = x + torch.rand(rows, length).to(dtype) * 1.5
        x[3, -1], x[5, 0], x[8] = torch.nan, torch.inf, -torch.inf
    return x


def every(dtype: torch.dtype) -> Function:
    functions = ANY_DTYPE + FLOATING * dtype.is_floating_point
    return lambda x: [fn(x) for fn in functions]


def flat(results: list[Any]) -> list[Tensor]:
    return [x for r in results for x in (r if isinstance(r, tuple) else (r,))]


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("length", [2, 5, 8, 16, 21, 33, 63])
def test_every_length(dtype: torch.dtype, length: int) -> None:
    torch.manual_seed(length)
    fn, level = every(dtype), "-march=x86-64-v3" if length in (5, 33) else ""
    options = {"cxx_flags": level} if level else {}
    compiled = torch.compile(fn, backend="cpugraph", options=options)
    for k, rows in enumerate((64, 127, 193)):
        x = layouts(inputs(dtype, rows, length))[(length + 2 * k) % 5]
        wide = x.double() if dtype.is_floating_point else x
        for found, eager, exact in zip(*map(flat, (compiled(x), fn(x), fn(wide))), strict=True):
            assert found.stride() == eager.stride()
            if eager.dtype.is_floating_point:
                assert_matches(found, eager, exact, name=f"{rows}x{length}")
            else:
                assert torch.equal(found, eager), f"{rows}x{length}"


def is_short(fn: Function, *shape: int, dtype: torch.dtype = torch.float32) -> bool:
    target = record(fn, torch.ones(shape, dtype=dtype))
    (program,) = target.programs
    return "d_load_short_rows<" in target.render(program, Config()).files["kernels.cpp"]


def test_which_rows_are_short() -> None:
    def softmax(x: Tensor) -> Tensor:
        return x.softmax(-1)

    assert is_short(softmax, 1000, 21)
    assert not is_short(softmax, 63, 21)  # less than a tile
    assert not is_short(softmax, 1000, 48)  # whole vectors
    assert is_short(softmax, 1000, 48, dtype=torch.bfloat16)
    assert not is_short(lambda x: x.cumsum(-1), 1000, 21)


def test_a_dynamic_number_of_rows() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.log_softmax(-1)

    compiled = torch.compile(fn, backend="cpugraph", dynamic=True)
    for rows in (1, 2, 63, 64, 65, 200):
        x = torch.randn(rows, 21)
        assert_matches(compiled(x), fn(x), fn(x.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_that_are_read_back(dtype: torch.dtype) -> None:
    """Tiles are filled before anything is stored: a sum that is a result, too, is read from it."""

    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        return total, F.layer_norm(total, total.shape[-1:]), total.softmax(-1)

    x, y = (torch.randn(200, 16).to(dtype) for _ in range(2))
    found = torch.compile(fn, backend="cpugraph")(x, y)
    for mine, eager, exact in zip(found, fn(x, y), fn(x.double(), y.double()), strict=True):
        assert_matches(mine, eager, exact)


def test_in_place() -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sub_(x.amax(-1, keepdim=True)).exp_()

    x = torch.randn(150, 7)
    eager, exact = x.clone(), x.double()
    torch.compile(fn, backend="cpugraph")(x)
    assert_matches(x, fn(eager), fn(exact))
