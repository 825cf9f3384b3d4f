"""Rows of equal numbers, whose mean is that number and whose variance is 0, in eager as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dicp.compare import assert_matches
from dicp.graphop.target import GraphTarget

aten = torch.ops.aten
VALUES = (0.1, 1e4, 3.7e-5)
"""No sum of many of them is exact; the first and last are rounded themselves."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = (1, 5, 33, 768, 5000)

pytestmark = pytest.mark.sweep

Shape = tuple[int, ...]


def rows(dtype: torch.dtype, axis: int, shape: Shape) -> Tensor:
    """A tensor whose value changes along `axis` alone."""
    values = torch.tensor(VALUES, dtype=torch.float64)
    values = values.repeat_interleave(shape[axis] // len(VALUES)).to(dtype)
    return values.reshape(-1, *[1] * (len(shape) - axis - 1)).expand(shape).contiguous()


MOMENTS: dict[str, tuple[Callable[[int], Shape], int, Any]] = {
    "inner": (lambda n: (3, n), 0, 1),
    "outer": (lambda n: (n, 3), 1, 0),
    "both": (lambda n: (4, 3, n), 1, (0, 2)),
    "planes": (lambda n: (8, 48, 32, max(n // 16, 2)), 1, (0, 2, 3)),
}
"""By form: a shape, the axis along which values change, the axes that are reduced."""


@pytest.fixture(autouse=True)
def own_mean(backend: Any) -> None:
    if isinstance(backend.target, GraphTarget):
        pytest.skip("the mean is the vendor's operator, which rounds it")


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str, backend: Any, dynamic: bool) -> None:
    shape_of, axis, axes = MOMENTS[name]

    def moments(x: Tensor) -> tuple[Tensor, ...]:
        variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        deviation, again = torch.std_mean(x, axes, correction=0, keepdim=True)
        return variance, deviation, x.var(axes, correction=-0.5), mean, again

    compiled = _compiled(moments, backend, dynamic)
    for size in LENGTHS[1:] if name == "planes" else LENGTHS:
        inputs = [rows(dtype, axis, shape_of(size)) for dtype in DTYPES]
        for x, (*spread, mean, again) in zip(inputs, compiled(inputs), strict=True):
            for value in spread:
                assert not value.any(), f"{x.dtype}, rows of {size}: {value.flatten()}"
            for value in (mean, again):
                assert torch.equal(value.expand_as(x), x), f"{x.dtype}, rows of {size}"


NORMS: dict[str, tuple[Callable[[int], Shape], int, Callable[[Tensor], Tensor]]] = {
    "layer_norm": (lambda n: (3, n), 0, lambda x: F.layer_norm(x, x.shape[1:])),
    "group_norm": (lambda n: (2, 6, n), 1, lambda x: F.group_norm(x, 3)),
    "instance_norm": (lambda n: (2, 3, n + 1), 1, F.instance_norm),
    "batch_norm": (
        lambda n: (2, 3, n), 1, lambda x: F.batch_norm(x, None, None, training=True),
    ),
    "batch_norm_channels_last": (
        lambda n: (2, n, n, 3) if n < 50 else (1, n, 2, 3), 3,
        lambda x: F.batch_norm(x.permute(0, 3, 1, 2), None, None, training=True),
    ),
    "std": (lambda n: (3, n), 0, lambda x: x.std(1, correction=0)),
}  # fmt: skip
"""By operator: a shape, the axis along which values change, the function, which is 0 everywhere."""


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, backend: Any, dynamic: bool) -> None:
    shape_of, axis, function = NORMS[name]
    compiled = _compiled(function, backend, dynamic)
    for size in LENGTHS:
        inputs = [rows(dtype, axis, shape_of(size)) for dtype in DTYPES]
        got, eager = _with_gradients(compiled, inputs), _with_gradients(_each(function), inputs)
        real = _with_gradients(_each(function), [x.double() for x in inputs], eager[0])
        for x, value, *grads in zip(inputs, *got, eager[1], real[1], strict=True):
            assert not value.any(), f"{x.dtype}, rows of {size}: {value.flatten()[:8]}"
            assert_matches(*grads, name=f"gradient of {x.dtype}, rows of {size}")


def test_group_norm_channels_last(backend: Any, dynamic: bool) -> None:
    """The mean and the results; eager's inverse deviation and gradients are rounding errors."""

    def normed(x: Tensor) -> tuple[Tensor, ...]:
        x = x.permute(0, 3, 1, 2)
        return aten.native_group_norm(x, None, None, len(x), 6, x.shape[2] * x.shape[3], 3, 1e-5)

    compiled = _compiled(normed, backend, dynamic)
    for size in LENGTHS:
        inputs = [rows(dtype, 3, (2, size, 1, 6)) for dtype in DTYPES]
        for x, (value, mean, _) in zip(inputs, compiled(inputs), strict=True):
            assert not value.any(), f"{x.dtype}, rows of {size}: {value.flatten()[:8]}"
            assert torch.equal(mean.to(x.dtype), x[:, 0, 0, ::2]), f"{x.dtype}, rows of {size}"


@pytest.mark.parametrize("axis", [0, 1])
def test_squares_that_overflow_are_no_rounding_errors(
    axis: int, backend: Any, dynamic: bool
) -> None:
    """Their variance is infinite and what it divides is 0, as in eager."""
    compiled = _compiled(
        lambda x: (x.var(axis), F.batch_norm(x, None, None, training=True)), backend, dynamic
    )
    for size in LENGTHS[2:]:
        x = torch.randn(3, size).sign() * 1e25
        ((variance, normed),) = compiled([x if axis else x.t().contiguous()])
        assert variance.isinf().all(), variance.flatten()[:4]
        if axis == 0:
            assert not normed.any(), normed.flatten()[:4]


@pytest.mark.parametrize("axis", [0, 1])
def test_normalize(axis: int, backend: Any, dynamic: bool) -> None:
    """Rows of one element are left out: their gradients are 0, which eager meets by chance. So is
    float64: each addition of equal squares is rounded alike, and there is no finer reference."""
    function = lambda x: F.normalize(x, dim=axis)  # noqa: E731
    compiled = _compiled(function, backend, dynamic)
    for size in LENGTHS[1:]:
        shape = (3, size) if axis else (size, 3)
        inputs = [rows(dtype, 1 - axis, shape) for dtype in DTYPES[:-1]]
        got, eager = _with_gradients(compiled, inputs), _with_gradients(_each(function), inputs)
        real = _with_gradients(_each(function), [x.double() for x in inputs], eager[0])
        for mine, theirs, exact in zip(got, eager, real, strict=True):
            for each in zip(mine, theirs, exact, strict=True):
                assert_matches(*each)


def _each(function: Callable[[Tensor], Any]) -> Callable[[list[Tensor]], list[Any]]:
    return lambda inputs: [function(x) for x in inputs]


def _compiled(
    function: Callable[[Tensor], Any], backend: Any, dynamic: bool
) -> Callable[[list[Tensor]], list[Any]]:
    backend.start_over()
    return torch.compile(_each(function), backend=backend, dynamic=dynamic, fullgraph=True)


def _with_gradients(
    function: Callable[[list[Tensor]], list[Tensor]], inputs: list[Tensor],
    like: list[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Outputs, and gradients of the inputs for random gradients of the outputs' dtypes."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(leaves)
    gen = torch.Generator().manual_seed(1)
    grads = [
        torch.randn(y.shape, generator=gen, dtype=torch.float64).to(z.dtype).to(y.dtype)
        for y, z in zip(outputs, like or outputs, strict=True)
    ]
    return [y.detach() for y in outputs], list(torch.autograd.grad(outputs, leaves, grads))
