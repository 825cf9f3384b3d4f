"""Rows beyond the caches: the next is prefetched, and whole cache lines are stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorder import record
from torch import Tensor
from torch.utils import _pytree as pytree

from dicp.compare import Rule, check_tensor
from dicp.config import Config

pytestmark = pytest.mark.sweep

BF16 = torch.bfloat16
ROWS, WIDTH = 40, 256


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> Any:
    """The gradients, with statistics of the same kernel."""
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, [WIDTH], weight, weight, 1e-5)
    return torch.ops.aten.native_layer_norm_backward(
        grad, x, [WIDTH], mean, rstd, weight, weight, [True, True, True]
    )


def residual_norm(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A result that is written while sums of it are taken."""
    total = x + y
    return F.layer_norm(total, (WIDTH,), weight), total


def group_norm(x: Tensor) -> Tensor:
    """Rows of two loops."""
    return F.group_norm(x.view(10, 8, 2, 256), 4, x[0, :8], x[0, 8:16])


def images(x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Long sums of pieces that lie apart: moments, and two sums for the gradient."""
    mean, scale = weight[:4], weight[4:8] + 1
    moved = torch.ops.aten.native_batch_norm_backward(
        y, x, scale, mean, scale, mean, scale, True, 1e-5, [True, False, False]
    )[0]
    return F.batch_norm(x, None, None, training=True), moved


CASES: dict[str, tuple[Callable[..., Any], int, int]] = {
    "softmax": (lambda x: x.softmax(-1), 1, 1),
    "log_softmax": (lambda x: x.log_softmax(-1), 1, 1),
    "weights": (lambda x: x.logsumexp(-1), 1, 1),
    "spread": (lambda x: x.std(-1), 1, 1),
    "normalized": (lambda x: x / x.square().mean(-1, keepdim=True).sqrt(), 1, 1),
    "centred by the extremum": (lambda x: (x - x.amin(-1, keepdim=True)).amax(-1), 1, 1),
    "layer_norm_backward": (layer_norm_backward, 2, 2),
    "residual_norm": (residual_norm, 2, 2),
    "group_norm": (group_norm, 1, 1),
    "images": (images, 2, 2),
}
"""A function, how many tensors of rows it takes, and how many places prefetch."""


def arguments(name: str, dtype: torch.dtype) -> list[Tensor]:
    count = CASES[name][1]
    shapes = {"group_norm": (80, 512), "images": (18, 4, 16, 16)}
    inputs = [torch.randn(shapes.get(name, (ROWS, WIDTH))).to(dtype) for _ in range(count)]
    return [*inputs, torch.rand(WIDTH).to(dtype)] if count == 2 else inputs


def source_of(fn: Callable[..., Any], *inputs: Tensor) -> str:
    target = record(fn, *inputs)
    return target.render(target.programs[0], Config()).files["kernels.cpp"]


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors count as large ones."""
    monkeypatch.setattr("dicp.vendor.cpu.schedule.inner_reduction.BEYOND_PRIVATE_CACHES", 4096)
    monkeypatch.setattr("dicp.vendor.cpu.target.cache_bytes", lambda: 4096)
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, BF16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("beyond")
def test_rows_that_are_prefetched(name: str, dtype: torch.dtype) -> None:
    fn, inputs = CASES[name][0], arguments(name, dtype)
    eager, exact = fn(*inputs), fn(*[x.double() for x in inputs])
    found = torch.compile(fn, backend="cpugraph", fullgraph=True)(*inputs)
    for mine, theirs, wanted in zip(*map(pytree.tree_leaves, (found, eager, exact)), strict=True):
        assert not check_tensor(mine, theirs, wanted, Rule())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("beyond")
def test_each_tensor_of_rows_is_fetched_once(name: str) -> None:
    fn, _, places = CASES[name]
    source = source_of(fn, *arguments(name, torch.float32))
    assert source.count("__builtin_prefetch") == places


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.usefixtures("beyond")
def test_numbers_that_are_none_pass_lanes(threads: int) -> None:
    x = torch.randn(ROWS, WIDTH)
    x[3, 200], x[5, 7], x[6, 9], x[7] = math.nan, math.inf, -math.inf, -math.inf
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for fn in (lambda x: x.softmax(-1), lambda x: (x - x.amin(-1, keepdim=True)).amax(-1)):
            found = torch.compile(fn, backend="cpugraph", fullgraph=True)(x)
            torch.testing.assert_close(found, fn(x), equal_nan=True)
    finally:
        torch.set_num_threads(before)


LEFT: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "one sweep": (lambda x: x.sum(-1), (64, 256)),
    "short rows": (lambda x: x.softmax(-1), (128, 64)),
    "no whole lines": (lambda x: x.softmax(-1), (64, 250)),
    "long rows": (lambda x: x.softmax(-1), (8, 8192)),
    "long sums": (lambda x: x.std(-1), (8, 3072)),
    "a row for all": (lambda x: x[0].softmax(-1) + x.shape[0], (64, 256)),
    "no rows": (lambda x: x.std(), (16, 256)),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.usefixtures("beyond")
def test_rows_that_are_not_prefetched(name: str) -> None:
    fn, shape = LEFT[name]
    x = torch.randn(shape)
    assert "__builtin_prefetch" not in source_of(fn, x)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(fn, backend="cpugraph")(x), fn(x))


def test_what_the_caches_hold_is_not_prefetched() -> None:
    source = source_of(lambda x: x.softmax(-1), torch.randn(ROWS, WIDTH))
    assert "__builtin_prefetch" not in source


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: (x * w, (x * w).amax()),
        lambda x, w: layer_norm_backward(x, x, w),
        lambda x, w: (x * w).softmax(-1),
    ],
)
@pytest.mark.usefixtures("beyond")
def test_each_thread_waits_for_what_it_wrote(fn: Callable[..., Any]) -> None:
    """Before the barrier after which another thread may read it."""
    source = source_of(fn, torch.randn(400, WIDTH), torch.rand(WIDTH))
    assert "d_store_lanes_non_temporal(" in source
    for kernel in source.split('extern "C"'):
        waits = kernel.count("nowait") == 1 <= kernel.count("d_store_fence();")
        assert waits if "d_store_lanes_non_temporal(" in kernel else "nowait" not in kernel


@pytest.mark.usefixtures("beyond")
def test_rows_of_short_floats_are_written_as_ever() -> None:
    source = source_of(lambda x: x.softmax(-1), torch.randn(ROWS, WIDTH).to(BF16))
    assert "__builtin_prefetch" in source and "d_store_lanes_non_temporal(" not in source
