"""Reductions: sums, extrema and their places, truth, mean and variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast
from dicp.loop.ir.index import Index, Size, normal, product
from dicp.loop.lowering.conditions import compare, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.value import Body
from dicp.loop.lowering.views import wrap
from dicp.loop.thresholds import MAX_CANCELLED, MIN_SHIFT, SAMPLE_STEP
from dicp.rules import RuleTable
from dicp.torch_private import floor_division

aten = torch.ops.aten
REDUCTION = RuleTable()
rule = REDUCTION.register


def axes_of(x: Value, dim: Any) -> list[int]:
    """Reduced axes; none given means all of them."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(x.ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({wrap(d, x.ndim) for d in dims} if x.ndim else set())


def count_of(x: Value, axes: Sequence[int]) -> Size:
    return product(x.shape[a] for a in axes)


def total(lw: Lowering, x: Value, axes: Sequence[int], dtype: torch.dtype, fn: Any = None) -> Value:
    """The sum of `fn(element)` along `axes` (kept with size 1), accumulated in `dtype`."""

    def body(idx: tuple[Index, ...]) -> Expr:
        e = cast(x.at(idx), dtype)
        return fn(e) if fn else e

    return lw.reduce("sum", x.shape, axes, dtype, body)


def finish(
    lw: Lowering, x: Value, axes: Sequence[int], keepdim: bool, output: int | None = None
) -> Value:
    """`x` cast to the dtype of the node's result (number `output` of several), its reduced `axes`
    of size 1 dropped unless `keepdim`."""
    x = lw.cast(x, lw.meta(output).dtype)
    return x if keepdim else lw.squeeze(x, axes)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(
    lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out = lw.meta().dtype
    axes = axes_of(x, dim)
    if out == torch.bool:
        return _truth(lw, "any", x, axes, keepdim)
    if opmath_dtype(out) == out:
        return lw.reduce("sum", x.shape, axes, out, lambda idx: cast(x.at(idx), out), keepdim)
    return finish(lw, total(lw, x, axes, opmath_dtype(out)), axes, keepdim)


@rule(aten.mean.default, aten.mean.dim)
def mean(
    lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out = lw.meta().dtype
    axes = axes_of(x, dim)
    return finish(lw, average(lw, x, axes, opmath_dtype(out)), axes, keepdim)


def average(lw: Lowering, x: Value, axes: Sequence[int], dtype: torch.dtype) -> Value:
    count = lw.scalar(count_of(x, axes), dtype)
    return lw.map(lambda s: s / count, total(lw, x, axes, dtype))


@rule(aten.prod.default, aten.prod.dim_int)
def prod(
    lw: Lowering, x: Value, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    out = lw.meta().dtype
    axes, wider = axes_of(x, dim), opmath_dtype(out)
    if not axes:
        return lw.cast(lw.copy(x), out)
    value = lw.reduce("prod", x.shape, axes, wider, lambda idx: cast(x.at(idx), wider))
    return finish(lw, value, axes, keepdim)


def _extremum(lw: Lowering, op: str, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    if x.dtype == torch.bool:
        op = {"max": "any", "min": "all"}[op]
    lw.round_elements(x)
    return lw.reduce(op, x.shape, axes, x.dtype, x.at, keepdim)


def _arg_extremum(
    lw: Lowering, op: str, x: Value, axis: int | None, keepdim: bool = False
) -> Value:
    """The index of the extremum along `axis` (of the flattened tensor where None)."""
    if axis is None:
        flat = lw.reshape(x, [product(x.shape)])
        value = _arg_extremum(lw, op, flat, 0)
        return lw.reshape(value, [1] * x.ndim if keepdim else [])
    if x.ndim == 0:
        return lw.pointwise((), torch.int64, lambda idx: ir.const(0, torch.int64))
    lw.round_elements(x)
    return lw.reduce(op, x.shape, [axis], torch.int64, x.at, keepdim)


def _extremum_rules(op: str) -> None:
    """The rules of `op`, "max" or "min": values, places, and both along one axis."""

    def values(lw: Lowering, x: Value, dim: Any = (), keepdim: bool = False) -> Value:
        return _extremum(lw, op, x, axes_of(x, dim), keepdim)

    def places(lw: Lowering, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        axis = None if dim is None else wrap(dim, x.ndim)
        return _arg_extremum(lw, f"arg{op}", x, axis, keepdim)

    def both(lw: Lowering, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        if x.ndim == 0:
            return lw.copy(x), _arg_extremum(lw, f"arg{op}", x, 0)
        return values(lw, x, wrap(dim, x.ndim), keepdim), places(lw, x, dim, keepdim)

    packet = getattr(aten, op)
    rule(getattr(aten, f"a{op}").default, packet.default)(values)
    rule(getattr(aten, f"arg{op}").default)(places)
    rule(packet.dim)(both)


_extremum_rules("max")
_extremum_rules("min")


def _truth(lw: Lowering, op: str, x: Value, dim: Any, keepdim: bool) -> Value:
    axes = axes_of(x, dim) if dim != [] else []  # a sum over [] reduces all dimensions
    lw.round_elements(x)
    value = lw.reduce(
        op, x.shape, axes, torch.bool, lambda idx: cast(x.at(idx), torch.bool), keepdim
    )
    return lw.cast(value, lw.meta().dtype)


REDUCTION.update({
    (aten.any.default, aten.any.dim, aten.any.dims):
        lambda lw, x, dim=None, keepdim=False: _truth(lw, "any", x, dim, keepdim),
    (aten.all.default, aten.all.dim, aten.all.dims):
        lambda lw, x, dim=None, keepdim=False: _truth(lw, "all", x, dim, keepdim),
})  # fmt: skip


def broadcast_in_memory(lw: Lowering, value: Value, shape: Sequence[Size]) -> Value:
    """`value` broadcast to `shape`, in memory: loops that read it beside others become one."""
    copy = lw.pointwise(shape, value.dtype, value.broadcast_at)
    return lw.value_of(lw.realize(copy))


def _summed(
    lw: Lowering, shape: Sequence[Size], axes: Sequence[int], first: int | None,
    dtype: torch.dtype, body: Body,
) -> Value:  # fmt: skip
    """The sum of `body` along `axes`; if `first` is one, along it first, and that is stored."""
    if first is None:
        return lw.reduce("sum", shape, axes, dtype, body)
    part = lw.reduce("sum", shape, [first], dtype, body)
    return total(lw, part, [axis for axis in axes if axis != first], dtype)


def _mean_of_sample(
    lw: Lowering, x: Value, axes: Sequence[int], first: int, dtype: torch.dtype
) -> Value:
    """The mean along `axes` of every SAMPLE_STEP-th element along `first`, 0 where that is not
    finite, in memory as `moments` reads it."""
    count = normal(floor_division(x.shape[first] + SAMPLE_STEP - 1, SAMPLE_STEP))
    shape = [*x.shape[:first], count, *x.shape[first + 1 :]]
    picked = lw.scalar(product(shape[a] for a in axes), dtype)

    def sample(idx: tuple[Index, ...]) -> Expr:
        at = [*idx[:first], idx[first] * SAMPLE_STEP, *idx[first + 1 :]]
        return cast(x.at(at), dtype)

    def estimate(s: Expr) -> Expr:
        mean = s / picked
        return select(compare("lt", apply("abs", dtype, mean), math.inf), mean, 0.0)

    mean = lw.map(estimate, _summed(lw, shape, axes, first, dtype, sample))
    return broadcast_in_memory(lw, mean, [*x.shape[:first], 1, *x.shape[first + 1 :]])


def moments(
    lw: Lowering, x: Value, axes: Sequence[int], dtype: torch.dtype, correction: Any = 0,
    first: int | None = None,
) -> tuple[Value, Value]:  # fmt: skip
    """Mean and variance along `axes` (kept with size 1), by the corrected two-pass algorithm.

    Sums along the axis `first`, if any, are stored, and then added along the others; the deviations
    are then from the mean of every SAMPLE_STEP-th element of it, a small part of a pass.

    The sum of the deviations from the quotient of sum and count corrects both: the mean of equal
    numbers is that number, and their variance 0.

    Source: Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, 1983.
    """
    size = lw.scalar(count_of(x, axes), dtype)
    eps = torch.finfo(dtype).eps

    def summed(body: Body) -> Value:
        return _summed(lw, x.shape, axes, first, dtype, body)

    if first is None:
        quotient = lw.map(lambda s: s / size, summed(lambda idx: cast(x.at(idx), dtype)))
    else:
        quotient = _mean_of_sample(lw, x, axes, first, dtype)

    def distance(idx: tuple[Index, ...]) -> Expr:
        return cast(x.at(idx), dtype) - quotient.broadcast_at(idx)

    rest = summed(distance)
    squares = summed(lambda idx: distance(idx) * distance(idx))
    freedom = size
    if correction != 0:
        freedom = freedom - lw.real(correction, dtype)
    freedom = apply("maximum", dtype, freedom, ir.const(0.0, dtype))
    share = apply("minimum", dtype, (size + 4.0) * eps, ir.const(MAX_CANCELLED, dtype))

    def mean(quotient: Expr, rest: Expr, squares: Expr) -> Expr:
        if first is not None:
            return quotient + rest / size
        # Below that, the correction is the error of its own sum; NaN beside infinities.
        shifted = compare("ge", rest * (rest / size), squares * (MIN_SHIFT * eps) ** 2)
        return select(shifted, quotient + rest / size, quotient)

    def variance(squares: Expr, rest: Expr) -> Expr:
        excess = rest * (rest / size)
        left = squares - excess
        left = select(compare("lt", left, squares * share), 0.0, left)  # infinite ones stay
        # Squares that overflow are infinite, whatever the excess.
        found = select(compare("lt", excess, math.inf), left, squares) / freedom
        return found if first is None else found + rest * 0.0  # NaN beside infinities

    return lw.map(mean, quotient, rest, squares), lw.map(variance, squares, rest)


def _mean_and_variance(
    lw: Lowering, x: Value, axes: Sequence[int], correction: Any
) -> tuple[Value, Value]:
    """`moments` in the dtype in which the target accumulates variances; no correction means 1."""
    dtype = torch.float64 if lw.wide_variance else opmath_dtype(x.dtype)
    return moments(lw, x, axes, dtype, 1.0 if correction is None else correction)


@rule(aten.var.correction, aten.var.dim, aten.var.default)
def var(
    lw: Lowering, x: Value, dim: Any = None, unbiased: Any = None, keepdim: bool = False,
    *, correction: Any = None,
) -> Value:  # fmt: skip
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        correction = float(unbiased)
    axes = axes_of(x, dim)
    _, v = _mean_and_variance(lw, x, axes, correction)
    return finish(lw, v, axes, keepdim)


@rule(aten.std.correction)
def std(
    lw: Lowering, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Value:
    axes = axes_of(x, dim)
    _, v = _mean_and_variance(lw, x, axes, correction)
    return finish(lw, lw.map(lambda e: apply("sqrt", e.dtype, e), v), axes, keepdim)


@rule(aten.var_mean.correction)
def var_mean(
    lw: Lowering, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    axes = axes_of(x, dim)
    mu, v = _mean_and_variance(lw, x, axes, correction)
    return finish(lw, v, axes, keepdim, 0), finish(lw, mu, axes, keepdim, 1)


@rule(aten.std_mean.correction)
def std_mean(
    lw: Lowering, x: Value, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[Value, Value]:
    axes = axes_of(x, dim)
    mu, v = _mean_and_variance(lw, x, axes, correction)
    s = lw.map(lambda e: apply("sqrt", e.dtype, e), v)
    return finish(lw, s, axes, keepdim, 0), finish(lw, mu, axes, keepdim, 1)
