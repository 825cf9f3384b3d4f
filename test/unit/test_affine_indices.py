"""Computed indices that are affine in the loop variables, against evaluation at every point."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import kernels, record
from torch import Tensor

from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Const, Expr, IndexValue, apply, checked_index, const
from dicp.loop.ir.index import ZERO, Index, Indirect, Size, Var, domain
from dicp.loop.passes.affine_indices import affine, with_affine

A = sympy.Symbol("a", integer=True, positive=True)
WHOLE = torch.int64


def number(size: Size, a: int) -> int:
    return size if isinstance(size, int) else int(size.subs(A, a))


def value_of(index: Index, point: Sequence[int], a: int) -> int:
    steps = ((point[v.position], c) for v, c in index.terms if isinstance(v, Var))
    return number(index.const, a) + sum(number(c, a) * at for at, c in steps)


OPERATORS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "maximum": max,
    "minimum": min,
    "lt": lambda a, b: a < b,
    "where": lambda test, a, b: a if test else b,
}


def evaluate(expr: Expr, point: Sequence[int], a: int) -> int:
    """The value at a point; raises IndexError where a check fails."""
    if isinstance(expr, IndexValue):
        return value_of(expr.index, point, a)
    if isinstance(expr, Const):
        return int(expr.value)
    args = [evaluate(arg, point, a) for arg in expr.args]
    if expr.op in OPERATORS:
        return OPERATORS[expr.op](*args)
    at, size = args
    at += size * (expr.op == "wrap_index" and at < 0)
    if not 0 <= at < size:
        raise IndexError(at)
    return at


@st.composite
def expressions(draw: st.DrawFn, shape: Sequence[Size], depth: int = 3) -> Expr:
    axes = domain(shape)
    kind = draw(st.integers(0, 8 if depth else 1))
    if kind == 0:
        return const(draw(st.integers(-3, 6)), WHOLE)
    if kind == 1:
        return ir.index_value(draw(st.sampled_from([*axes, Index(shape[0]), Index(shape[-1])])))
    a, b = (draw(expressions(shape, depth - 1)) for _ in range(2))
    if kind == 2:
        return apply("neg", WHOLE, a)
    if kind in (3, 4):
        op = draw(st.sampled_from(["check_index", "wrap_index"]))
        return checked_index(op, a, ir.index_value(Index(shape[draw(st.integers(0, 1))])), None)
    if kind == 5:
        return apply("where", WHOLE, apply("lt", torch.bool, a, b), a, apply("add", WHOLE, a, b))
    return apply(draw(st.sampled_from(["add", "sub", "mul", "maximum", "minimum"])), WHOLE, a, b)


SHAPES: list[tuple[Size, Size]] = [(3, 4), (5, A), (A, 2 * A)]


@given(st.data())
def test_an_affine_index_has_the_values_of_the_expression(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    expr = data.draw(expressions(shape))
    index = affine(expr)
    if index is None:
        return
    for a in (1, 2, 5):
        for point in itertools.product(*(range(number(size, a)) for size in shape)):
            assert value_of(index, point, a) == evaluate(expr, point, a)


ROW, COLUMN = (ir.index_value(i) for i in domain((A, 8)))
FOUND: dict[str, tuple[Expr, str]] = {
    "a sum": (ROW + COLUMN * 2 + 1, "v0 + 2*v1 + 1"),
    "checked": (checked_index("check_index", COLUMN, const(8, WHOLE), None), "v1"),
    "checked, of a symbolic size": (
        checked_index("wrap_index", ROW, ir.index_value(Index(A)), None), "v0",
    ),
    "counted from the end": (
        checked_index("wrap_index", apply("neg", WHOLE, COLUMN + 1), const(9, WHOLE), None),
        "-1*v1 + 8",
    ),
    "clamped": (apply("maximum", WHOLE, COLUMN, const(0, WHOLE)), "v1"),
    "wrapped by a comparison": (
        apply("where", WHOLE, apply("lt", torch.bool, COLUMN, const(0, WHOLE)), ROW, COLUMN), "v1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_is_proved(name: str) -> None:
    expr, text = FOUND[name]
    found = affine(expr)
    assert found is not None and str(found) == text
    assert str(with_affine(Index(3, ((Indirect(expr, 9), 2),)))) == str(found * 2 + 3)


NOT_FOUND = {
    "out of bounds": checked_index("check_index", COLUMN, const(7, WHOLE), None),
    "partly from the end": checked_index(
        "wrap_index", apply("sub", WHOLE, COLUMN, const(1, WHOLE)), const(9, WHOLE), None
    ),
    "a product of variables": apply("mul", WHOLE, ROW, COLUMN),
    "clamped in the middle": apply("minimum", WHOLE, COLUMN, const(5, WHOLE)),
    "in 32 bits": ir.rounded(COLUMN, torch.int32),
}


def test_shared_operands_are_looked_at_once() -> None:
    expr = COLUMN
    for _ in range(60):
        expr = apply("maximum", WHOLE, expr, expr + 1)
    assert str(affine(expr)) == "v1 + 60"


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_is_not_affine_stays(name: str) -> None:
    expr = NOT_FOUND[name]
    assert affine(expr) is None
    index = Index(0, ((Indirect(expr, 9), 1),))
    assert with_affine(index) == index and with_affine(ZERO) == ZERO


def test_an_index_of_arange_is_read_like_a_slice(dynamic: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return x[:, torch.arange(x.shape[1] - 1, -1, -1)] * 2

    x = torch.randn(4, 9)
    target = record(fn, x, dynamic=dynamic)
    assert kernels(target) == [1] and "wrap_index" not in target.programs[0].text()
    assert torch.equal(torch.compile(fn, backend="cpugraph", dynamic=dynamic)(x), fn(x))
