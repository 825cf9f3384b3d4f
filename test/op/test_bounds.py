"""Indices and sizes that eager refuses are refused, and all others give what eager gives.

One graph holds every operator, so that each bad index is met among good ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dicp.errors import IndexOutOfBoundsError
from dicp.testing import BackendUnderTest

aten = torch.ops.aten
ROWS, WIDTH = 4, 5


@dataclass(frozen=True)
class Bound:
    """An operator of (x, index), the shape of the index and the size that it points into."""

    op: str
    fn: Callable[..., Any]
    shape: tuple[int, ...]
    size: int


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


BOUNDS = [
    Bound("index.Tensor", lambda x, i: x[i], (3,), ROWS),
    Bound("index.Tensor", lambda x, i: x[1:, i], (3,), WIDTH),
    Bound("gather", lambda x, i: x.gather(1, i), (4, 3), WIDTH),
    Bound("gather", lambda x, i: x.gather(1, i).exp(), (4, 70), WIDTH),
    Bound("take", lambda x, i: x.take(i), (3,), ROWS * WIDTH),
    Bound("index_select", lambda x, i: x.index_select(1, i), (3,), WIDTH),
    Bound("embedding", lambda x, i: F.embedding(i, x), (3,), ROWS),
    Bound("embedding", lambda x, i: torch.cat([x[:3, 1:], F.embedding(i, x)], 1), (3,), ROWS),
    Bound("embedding", lambda x, i: torch.cat([F.embedding(i, x), x[:2]]), (3,), ROWS),
    Bound("embedding", lambda x, i: F.pad(F.embedding(i, x), (1, 2)), (3,), ROWS),
    Bound("embedding", lambda x, i: F.embedding(i, x)[:2, :3], (3,), ROWS),
    Bound("put", lambda x, i: x.put(i, _ones(1)), (1,), ROWS * WIDTH),
    Bound("put", lambda x, i: x.put(i, _ones(3), accumulate=True), (3,), ROWS * WIDTH),
    Bound("index_put", lambda x, i: x.index_put((i,), _ones(1, 5)), (1,), ROWS),
    Bound("index_put", lambda x, i: x.index_put((i,), x[:3], accumulate=True), (3,), ROWS),
    Bound("scatter.src", lambda x, i: x.scatter(1, i, x[:, 1:2]), (4, 1), WIDTH),
    Bound("scatter.value", lambda x, i: x.scatter(1, i, 3.0), (4, 3), WIDTH),
    Bound("scatter_add", lambda x, i: x.scatter_add(1, i, x), (4, 3), WIDTH),
    Bound("scatter_reduce", lambda x, i: x.scatter_reduce(1, i, x, "amax"), (4, 3), WIDTH),
    Bound("index_copy", lambda x, i: x.index_copy(1, i, x[:, 1:2]), (1,), WIDTH),
    Bound("index_fill", lambda x, i: x.index_fill(1, i, 3.0), (2,), WIDTH),
    Bound("index_add", lambda x, i: x.index_add(1, i, x[:, :2]), (2,), WIDTH),
    Bound("index_reduce", lambda x, i: x.index_reduce(1, i, x[:, :2], "amin"), (2,), WIDTH),
    Bound("max_unpool2d", lambda x, i: F.max_unpool1d(x[:, :4], i, 2), (4, 4), 8),
    Bound("max_unpool2d", lambda x, i: F.max_unpool2d(x[None, :, :4], i, 2), (1, 4, 4), 64),
    Bound("max_unpool3d", lambda x, i: F.max_unpool3d(x[None, None, :2, :2], i, 2),
          (1, 1, 2, 2), 32),
    Bound("nll_loss_forward", lambda x, i: F.nll_loss(x, i), (4,), WIDTH),
    Bound("nll_loss_backward", lambda x, i: aten.nll_loss_backward(
        x[0, 0], x, i, None, 1, 2, x[1, 1]), (4,), WIDTH),
]  # fmt: skip


def everything(x: torch.Tensor, indices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [bound.fn(x, i) * 2 for bound, i in zip(BOUNDS, indices, strict=True)]


def _good(bound: Bound) -> torch.Tensor:
    """Indices in range, of which no two point to the same element of a result that is stored to."""
    return torch.arange(math.prod(bound.shape)).reshape(bound.shape) % bound.size


def outcome(fn: Callable[..., Any], *args: Any) -> Any:
    try:
        return fn(*args)
    except Exception as error:
        return error


def check_bounds(compiled: Callable[..., Any], numbers: Sequence[int], exact: bool) -> None:
    """Every value at each of `numbers` of BOUNDS; `exact`: the error says which and where."""
    x = torch.rand(ROWS, WIDTH)
    for number in numbers:
        bound = BOUNDS[number]
        size = bound.size
        for value in (size - 1, size, -1, -size, -size - 1, 2**40, -(2**63)):
            indices = [_good(b) for b in BOUNDS]
            indices[number].view(-1)[-1] = value
            expected = outcome(bound.fn, x, indices[number])
            got = outcome(compiled, x, indices)
            what = f"{bound.op}, index {value} of {size}"
            if not isinstance(expected, Exception):
                assert not isinstance(got, Exception), f"{what}: {got}"
                torch.testing.assert_close(got[number], expected * 2, msg=what)
                continue
            assert isinstance(got, Exception), f"{what} is accepted"
            if exact and str(got) != str(expected):  # else it is eager's own
                assert isinstance(got, IndexOutOfBoundsError), what
                assert bound.op in got.op and got.user_line, what
                assert (got.index, got.size) == (value, size), what
    indices = [_good(b) for b in BOUNDS]
    torch.testing.assert_close(compiled(x, indices), everything(x, indices))  # still usable


def test_indices_are_checked_as_in_eager(backend: BackendUnderTest, dynamic: bool) -> None:
    compiled = torch.compile(everything, backend=backend, dynamic=dynamic)
    check_bounds(compiled, range(len(BOUNDS)), exact=True)


OFFSETS = torch.tensor([0, 1])
COMPOSED = [
    Bound("embedding_bag", lambda x, i: F.embedding_bag(i, x, OFFSETS), (3,), ROWS),
    Bound("embedding_bag", lambda x, i: F.embedding_bag(i, x, OFFSETS, mode="max"), (3,), ROWS),
    Bound("embedding", lambda x, i: F.embedding(i.int(), x), (3,), ROWS),
    Bound("one_hot", lambda x, i: F.one_hot(i, WIDTH), (3,), WIDTH),
    Bound("take_along_dim", lambda x, i: x.take_along_dim(i, 1), (4, 2), WIDTH),
    Bound("cross_entropy", lambda x, i: F.cross_entropy(x, i, ignore_index=-2), (4,), WIDTH),
    Bound("cross_entropy", lambda x, i: F.cross_entropy(
        x, i, x[0], reduction="sum", label_smoothing=0.1), (4,), WIDTH),
    Bound("nll_loss2d", lambda x, i: F.nll_loss(x.t().reshape(1, 5, 2, 2), i), (1, 2, 2), WIDTH),
    Bound("multi_margin_loss", F.multi_margin_loss, (4,), WIDTH),
]  # fmt: skip


@pytest.mark.static_only
def test_what_is_composed_of_lookups_refuses_what_eager_refuses(
    backend: BackendUnderTest, dynamic: bool
) -> None:
    x = torch.rand(ROWS, WIDTH)
    for bound in COMPOSED:
        backend.start_over()
        compiled = torch.compile(lambda x, i, fn=bound.fn: fn(x, i) * 2, backend=backend)
        for value in (bound.size - 1, bound.size, -1, -2, -bound.size - 1, 2**31 - 1):
            index = _good(bound)
            index.view(-1)[-1] = value
            expected, got = outcome(bound.fn, x, index), outcome(compiled, x, index)
            what = f"{bound.op}, index {value} of {bound.size}"
            if isinstance(expected, Exception):
                assert isinstance(got, Exception), f"{what} is accepted"
            else:
                torch.testing.assert_close(got, expected * 2, msg=what)


EMPTY, ROW = torch.rand(0, WIDTH), torch.zeros(1, dtype=torch.int64)
X, MASK = torch.rand(ROWS, WIDTH), torch.tensor([True, False, True])


def _set(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[mask] = value
    return y


REFUSED: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("index", lambda x, i: x[i], (EMPTY, ROW)),
    ("index_nothing", lambda x, i: x[i], (torch.rand(0, 0), ROW)),
    ("gather", lambda x, i: x.gather(0, i), (EMPTY, ROW.view(1, 1))),
    ("index_select", lambda x, i: x.index_select(0, i), (torch.rand(0, 0), ROW)),
    ("embedding", lambda x, i: F.embedding(i, x), (EMPTY, ROW)),
    ("take", lambda x, i: x.take(i), (EMPTY, ROW)),
    ("put", lambda x, i: x.put(i, _ones(1)), (EMPTY, ROW)),
    ("index_put", lambda x, i: x.index_put((i,), _ones(1, 5)), (EMPTY, ROW)),
    ("scatter", lambda x, i: x.scatter(0, i, 1.0), (EMPTY, ROW.view(1, 1))),
    ("scatter_add", lambda x, i: x.scatter_add(0, i, _ones(1, 1)), (EMPTY, ROW.view(1, 1))),
    ("index_copy", lambda x, i: x.index_copy(0, i, _ones(1, 5)), (EMPTY, ROW)),
    ("index_fill", lambda x, i: x.index_fill(0, i, 1.0), (EMPTY, ROW)),
    ("index_reduce", lambda x, i: x.index_reduce(0, i, _ones(1, 5), "amax"), (EMPTY, ROW)),
    ("mask_too_short", _set, (X, MASK, torch.tensor(2.0))),
    ("mask_too_wide", _set, (X, torch.rand(4, 6) > 0.5, torch.tensor(2.0))),
    ("mask_of_one", _set, (X, MASK[:1], torch.rand(1, 1))),
    ("as_strided", lambda x: x.as_strided((3, 3), (2, 1)), (torch.rand(6),)),
    ("as_strided_offset", lambda x: x.as_strided((2, 2), (2, 1), 3), (torch.rand(6),)),
    ("as_strided_fresh", lambda x: (x + 1).as_strided((4, 4), (4, 1)), (torch.rand(15),)),
    ("index_add_rows", lambda x, v: x.index_add(0, ROW, v), (X, torch.rand(1, 7))),
    ("index_reduce_rows", lambda x, v: x.index_reduce(0, ROW, v, "amax"), (X, torch.rand(1, 1))),
    ("put_numbers", lambda x, v: x.put(ROW, v), (X, torch.rand(3))),
    ("index_put_rows", lambda x, v: x.index_put((ROW,), v), (X, torch.rand(1, 4))),
    ("select_scatter", lambda x, v: x.select_scatter(v, 0, 1), (X, torch.rand(4))),
    ("slice_scatter", lambda x, v: x.slice_scatter(v, 0, 1, 3), (X, torch.rand(3, 5))),
    ("diagonal_scatter", lambda x, v: x.diagonal_scatter(v), (X, torch.rand(1))),
    (
        "multilabel_after_the_end",
        F.multilabel_margin_loss,
        (X[:1], torch.tensor([[1, -1, 9, 0, 0]])),
    ),
    ("multilabel_below", F.multilabel_margin_loss, (X[:1], torch.tensor([[1, -1, -2, 0, 0]]))),
]


@pytest.mark.static_only
def test_the_gradient_of_a_lookup_alone(backend: BackendUnderTest, dynamic: bool) -> None:
    """Eager refuses the lookup, of which nothing else is left in the graph."""

    def fn(g: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        gradient: torch.Tensor = aten.embedding_dense_backward(g, i, ROWS, 1, False)
        return gradient * 2

    compiled, g = torch.compile(fn, backend=backend), X[:3]
    torch.testing.assert_close(compiled(g, _rows(3)), fn(g, _rows(3)))
    for bad in (ROWS, -1, -ROWS - 1, 2**40):
        assert isinstance(outcome(compiled, g, _rows(bad)), Exception), f"{bad} is accepted"


def _rows(last: int) -> torch.Tensor:
    return torch.tensor([0, 1, last])


@pytest.mark.static_only
def test_sizes_are_checked_as_in_eager(backend: BackendUnderTest, dynamic: bool) -> None:
    for name, fn, args in REFUSED:
        with pytest.raises((RuntimeError, IndexError)):
            fn(*args)
        backend.start_over()
        got = outcome(torch.compile(lambda *a, fn=fn: fn(*a) * 2, backend=backend), *args)
        assert isinstance(got, Exception), f"{name} is accepted"


@pytest.mark.dynamic_only
def test_sizes_that_change_are_checked(backend: BackendUnderTest, dynamic: bool) -> None:
    def write(x: Any, mask: Any, values: Any, row: Any) -> Any:
        put = x.put(torch.arange(values.shape[0] * 0 + 2), values)
        return put, x.index_put((mask,), x[0, 0]), x.diagonal_scatter(row)

    good = (X, torch.rand(ROWS) > 0.5, torch.rand(2), torch.rand(ROWS))
    compiled = torch.compile(write, backend=backend, dynamic=True)
    torch.testing.assert_close(compiled(*good), write(*good))
    for k, wrong in ((1, MASK), (2, torch.rand(3)), (3, torch.rand(3))):
        args = [*good[:k], wrong, *good[k + 1 :]]
        assert isinstance(outcome(write, *args), Exception)
        assert isinstance(outcome(compiled, *args), Exception), f"argument {k} is accepted"
    torch.testing.assert_close(compiled(*good), write(*good))


WINDOW = (2, 3), (3, 1)
STORAGE_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "beyond": lambda x: x.as_strided(*WINDOW, 4) * 2,
    "inside": lambda x: x.as_strided(*WINDOW, 0) * 2,
    "copied": lambda x: torch.as_strided_copy(x, *WINDOW, 0),
    "of_a_copy": lambda x: x.clone().as_strided((2, 2), (2, 1), 1) * 2,
    "written": lambda x: torch.as_strided_scatter(x, -torch.ones(2, 2), (2, 2), (2, 1), 1) * 2,
    "covered": lambda x: torch.as_strided_scatter(x, -torch.ones(6), (6,), (1,), 0) * 2,
    "into_windows": lambda x: x.unfold(0, 3, 1).slice_scatter(-torch.ones(1, 3), 0, 1, 2) * 2,
}


@pytest.mark.parametrize("name", STORAGE_VIEWS)
def test_a_view_of_the_storage_follows_it(
    name: str, backend: BackendUnderTest, dynamic: bool
) -> None:
    """Where an input begins in its storage differs from call to call."""
    memory, fn = torch.arange(20.0), STORAGE_VIEWS[name]
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    for start in (0, 1, 3):
        x = memory[start : start + 6]
        torch.testing.assert_close(compiled(x), fn(x))


WRITTEN_STORAGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in_front": lambda x: (x.add_(1), x.as_strided((3,), (1,), 0) * 2)[1],
    "behind": lambda x: (x[1:3].add_(1), x.as_strided((9,), (1,)) * 2)[1],
    "copied": lambda x: (x.add_(1), torch.as_strided_copy(x, (3,), (1,), 1))[1],
    "through_a_window": lambda x: (x.as_strided((2,), (1,), 1).add_(5), x * 2)[1],
    "scattered": lambda x: torch.slice_scatter(x, x[:2], 0, 1, 3).as_strided((3,), (1,), 0) * 2,
}


@pytest.mark.parametrize("name", WRITTEN_STORAGES)
def test_beside_the_elements_of_what_is_written(
    name: str, backend: BackendUnderTest, dynamic: bool
) -> None:
    fn = WRITTEN_STORAGES[name]
    for starts in ((0, 1, 3), (3, 0, 1)):
        backend.start_over()
        compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
        for start in starts:
            mine, given = (torch.arange(20.0)[start : start + 6] for _ in range(2))
            torch.testing.assert_close(compiled(mine), fn(given))
            torch.testing.assert_close(mine._base, given._base)


def test_gradient_at_an_offset_of_the_storage(backend: BackendUnderTest, dynamic: bool) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((3,), (1,), 3) * 2

    def gradient(run: Callable[[torch.Tensor], torch.Tensor], start: int) -> torch.Tensor:
        memory = torch.arange(20.0, requires_grad=True)
        return torch.autograd.grad(run(memory[start : start + 6]).sum(), memory)[0]

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    for start in (1, 0, 3):
        torch.testing.assert_close(gradient(compiled, start), gradient(fn, start))


GAP_READERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "slice": lambda x: x[1:].add_(1),
    "select": lambda x: x[1].mul_(5),
    "diagonal": lambda x: x[None].diagonal().mul_(5),
    "all": lambda x: x.copy_(x * 2),
}


@pytest.mark.parametrize("name", GAP_READERS)
def test_between_the_elements_of_what_is_written(
    name: str, backend: BackendUnderTest, dynamic: bool
) -> None:
    """A column is written into; a view of its storage reads the other columns."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        GAP_READERS[name](x)
        return x.as_strided((2, 3), (3, 1)) * 2

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    for first in (0, 2):
        mine, given = (torch.arange(24.0).view(8, 3)[first : first + 4, 1] for _ in range(2))
        torch.testing.assert_close(compiled(mine), fn(given))
        torch.testing.assert_close(mine._base, given._base)


ODD = (math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9, -2.7, 2.0**31)


@pytest.mark.static_only
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_samples_far_outside(backend: BackendUnderTest, dynamic: bool, padding: str) -> None:
    grid = torch.rand(1, 2, 8, 2) * 2 - 1
    grid[0, 0, :, 0] = grid[0, 1, :, 1] = torch.tensor(ODD)
    x = torch.rand(1, 2, 4, 5)

    def fn(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        modes = ("bilinear", "nearest", "bicubic")
        return [F.grid_sample(x, grid, m, padding, align_corners=False) * 2 for m in modes]

    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    torch.testing.assert_close(compiled(x, grid), fn(x, grid), equal_nan=True)


@pytest.mark.static_only
def test_a_storage_that_was_given_back(backend: BackendUnderTest, dynamic: bool) -> None:
    compiled = torch.compile(lambda x: x * 2, backend=backend)
    x = torch.rand(64)
    torch.testing.assert_close(compiled(x), x * 2)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        compiled(x)


CHECKED_VALUES: dict[str, tuple[Callable[..., Any], list[float], list[float]]] = {
    "bernoulli": (torch.bernoulli, [0.0, 1.0], [0.5, 1.5]),
    "bernoulli of NaN": (torch.bernoulli, [0.5, 0.5], [0.5, math.nan]),
    "bernoulli in place": (lambda p: torch.zeros(2).bernoulli_(p), [0.0, 1.0], [-0.1, 0.5]),
    "normal": (lambda std: torch.normal(0.0, std), [0.0, 9.0], [1.0, -1.0]),
    "normal of means": (lambda std: torch.normal(std, std), [0.0, 9.0], [1.0, math.nan]),
    "cross entropy": (lambda x: F.binary_cross_entropy(x, x), [0.0, 1.0], [0.5, 1.5]),
    "cross entropy of targets": (
        lambda t: F.binary_cross_entropy(t.clamp(0, 1), t), [0.5, 1.0], [0.5, -0.5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKED_VALUES)
def test_numbers_in_tensors_that_eager_refuses(name: str, backend: Any, dynamic: bool) -> None:
    """One compiled function takes good numbers and refuses bad ones, as eager does."""
    fn, good, bad = CHECKED_VALUES[name]
    run = torch.compile(fn, backend=backend, dynamic=dynamic)
    for numbers in (good, bad, good):
        x = torch.tensor(numbers, device=backend.device)
        expected, found = outcome(fn, x.clone()), outcome(run, x.clone())
        assert isinstance(found, Exception) == isinstance(expected, Exception), (numbers, found)
        if isinstance(expected, Exception):
            assert str(found).splitlines()[0] in str(expected)


def test_gradient_of_a_checked_loss(backend: Any) -> None:
    """The assertion belongs to the forward graph, of leaves and of computed probabilities."""
    run = torch.compile(lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), backend=backend)
    x = torch.randn(5, 4, device=backend.device, requires_grad=True)
    t = torch.rand(5, 4, device=backend.device)
    (mine,) = torch.autograd.grad(run(x, t), x)
    (theirs,) = torch.autograd.grad(F.binary_cross_entropy(x.sigmoid(), t), x)
    torch.testing.assert_close(mine, theirs)
    with pytest.raises(RuntimeError, match="all elements of target"):
        run(x, t + 1)
