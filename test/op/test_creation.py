"""Tensors from nothing or from another tensor's shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dicp.testing import FLOATS, INTS, op

X = (6, 37)
ANY = (*FLOATS, *INTS, torch.int8)
F32 = (torch.float32,)
aten = torch.ops.aten
prims = torch.ops.prims


def _ranges(x: torch.Tensor) -> Any:
    n = x.shape[1]
    return (
        torch.arange(n, device=x.device),
        torch.arange(3, n, device=x.device),
        torch.arange(0, n, 3, device=x.device),
        torch.arange(n, 0, -2, device=x.device),
        torch.arange(0.5, 9.0, 0.7, device=x.device),
        torch.arange(0, n, dtype=torch.float32, device=x.device),
        torch.arange(5, dtype=torch.bfloat16, device=x.device),
    )


PLAIN = ("contiguous",)


def _iota(x: Any) -> Any:
    numbers = prims.iota(
        6, start=1, step=2, dtype=torch.int64, device=x.device, requires_grad=False
    )
    return numbers, numbers * 2


CASES = [
    op("arange", _ranges, X, dtypes=F32, layouts=("contiguous",)),
    op("arange_plus", lambda x: x + torch.arange(x.shape[1], device=x.device) * 2, X),
    op(
        "linspace",
        lambda x: (
            torch.linspace(0, 1, 11, device=x.device) + x[0, 0],
            torch.logspace(0, 2, 5, device=x.device),
        ),
        X,
        dtypes=F32,
    ),
    op(
        "full",
        lambda x: (
            torch.full((3, 4), 1.5),
            torch.full((2,), 7),
            torch.full((2, 2), True),
            torch.full(x.shape, float("-inf"), dtype=torch.float16),
        ),
        X,
        dtypes=F32,
        layouts=("contiguous",),
    ),
    op(
        "full_like",
        lambda x: (
            torch.full_like(x, 3),
            torch.full_like(x, 2.7, dtype=torch.float64),
            torch.full_like(x, 1, dtype=torch.bool),
        ),
        X,
        dtypes=ANY,
    ),
    op(
        "zeros_ones_like",
        lambda x: (
            torch.zeros_like(x),
            torch.ones_like(x),
            x.new_zeros(3),
            x.new_ones(2, 2),
            x.new_full((2,), 5),
        ),
        X,
        dtypes=ANY,
    ),
    op("zeros_plus", lambda x: torch.zeros(x.shape) + x * torch.ones(1), X, dtypes=F32),
    op(
        "eye",
        lambda x: [torch.eye(*n, device=x.device) for n in ((5,), (3, 7), (x.shape[0],), (300, 2))],
        X,
        dtypes=F32,
    ),
    op("eye_matmul", lambda x: torch.eye(x.shape[0], device=x.device) @ x, X, dtypes=F32),
    op(
        "scalar_tensor",
        lambda x: (
            x * torch.tensor(0.5, device=x.device),
            aten.scalar_tensor.default(3.0, device=x.device),
            torch.scalar_tensor(2, dtype=torch.int64, device=x.device),
        ),
        X,
        dtypes=FLOATS,
    ),
    op("constant_tensor", lambda x: x[:, :3] + torch.tensor([1.5, -2.0, 1e-7], device=x.device), X),
    op(
        "constant_extremes",
        lambda x: (
            torch.full((), 3.4028234e38),
            torch.full((), float("nan")),
            torch.tensor(2**62 + 1),
            torch.full((2,), -(2**63), dtype=torch.int64),
            torch.full((1,), 1e-45) + x[0, 0],
        ),
        X,
        dtypes=F32,
        layouts=("contiguous",),
    ),
    op(
        "empty_then_fill",
        lambda x: (
            torch.empty(x.shape).fill_(2.0),
            torch.empty_like(x).copy_(x),
            torch.empty_strided((2, 3), (1, 2)).zero_(),
        ),
        X,
        dtypes=F32,
    ),
    op("fill", lambda x: (aten.fill.Scalar(x, 2), torch.fill(x, 3)), X, dtypes=ANY),
    op("copy", lambda x, y: aten.copy.default(x, y), X, (37,), dtypes=F32, grad=False),
    op(
        "causal_mask",
        lambda x: torch.triu(torch.full((x.shape[1], x.shape[1]), float("-inf")), 1) + x[0],
        X,
        dtypes=F32,
    ),
    op(
        "tri_indices",
        lambda x: (
            torch.tril_indices(4, 5, device=x.device),
            torch.triu_indices(4, 5, 1, device=x.device),
        ),
        X,
        dtypes=F32,
    ),
    op(
        "complex",
        lambda x, y: torch.view_as_real(torch.complex(x, y)),
        X,
        X,
        dtypes=(torch.float32, torch.float64),
        expect="native",
    ),
    op("window", lambda x: torch.hann_window(8) + x[0, 0], X, dtypes=F32),
    op("_unsafe_view", lambda x: aten._unsafe_view(x * 2, [37, 6]), X, fixed=X, layouts=PLAIN),
    op("lift_fresh_copy", lambda x: aten.lift_fresh_copy(x) * 2, X, layouts=PLAIN),
    op("new_empty_strided", lambda x: aten.new_empty_strided(x, [3, 4], [1, 3]).fill_(2), X),
    op(
        "convert_element_type",
        lambda x: prims.convert_element_type(x, torch.float64) + 1,
        X,
        grad=False,
    ),
    op("iota", _iota, X, dtypes=F32, grad=False),
    op("to_device_and_back", lambda x: x.cpu().to(x.device).type_as(x), X, exact=True),
]


def test_op(case: Any, check_op: Any) -> None:
    check_op(case)


@pytest.mark.parametrize("strides", [(1, 2, 3), (0, 1, 2), (4, 1, 2)], ids=str)
def test_strides_of_a_new_tensor(strides: tuple[int, ...], backend: Any, dynamic: bool) -> None:
    """Also where elements share memory; each call has eager's strides."""
    run = torch.compile(
        lambda x: (x.new_empty_strided((3, 2, 2), strides), x + 1), backend=backend, dynamic=dynamic
    )
    new, _ = run(torch.ones(2, device=backend.device))
    assert new.stride() == strides


ENDS: list[tuple[Any, Any, int]] = [
    (4.3, 0, 50),
    (-3.9, torch.tensor(3.9), 12),
    (torch.tensor(7.5), torch.tensor(-40), 31),
    (0, 10**9, 50),
    (-(2**53), 2**53, 7),
    (2.7, 9, 1),
]


SPACES = [
    (*space, dtype)
    for space in ENDS
    for dtype in (torch.int64, torch.int32, torch.int8)
    if abs(space[1]) <= torch.iinfo(dtype).max
]


@pytest.mark.parametrize(("start", "end", "steps", "dtype"), SPACES)
def test_linspace_of_integers_truncates_its_ends(
    start: Any, end: Any, steps: int, dtype: torch.dtype, backend_name: str
) -> None:
    spaced = lambda steps: torch.linspace(start, end, steps, dtype=dtype)  # noqa: E731
    run = torch.compile(spaced, backend=backend_name)
    for count in (steps, steps + 1):
        assert torch.equal(run(count), spaced(count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.bool], ids=str)
def test_uninitialized_memory_is_filled_under_deterministic_algorithms(
    backend: Any, dtype: torch.dtype
) -> None:
    """With NaN or the largest integer, so that reads of it are seen."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        strided = x.new_empty_strided((2, 3), (1, 2))
        new = torch.empty(2, dtype=dtype, device=x.device)
        return new, torch.empty_like(x), x.new_empty(3), strided

    x = torch.ones(4, dtype=dtype, device=backend.device)
    compiled = torch.compile(fn, backend=backend)
    compiled(x)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(compiled(x), fn(x), equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)
