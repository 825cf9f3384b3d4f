"""Reductions, scans, sorting and searching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.operators import NoRule, Ops, Value, axes_of
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def is_empty(g: Ops, x: Value) -> bool:
    return any(g.same(size, 0) for size in x.shape)


def count_of(x: Value, axes: Sequence[int]) -> Any:
    return math.prod([x.shape[a] for a in axes])


@rule(aten.sum.dim_IntList)
def sum_dims(
    g: Ops, x: Value, dims: Sequence[int] | None, keepdim: bool = False, dtype: Any = None
) -> Value:
    axes = axes_of(dims, x.ndim)
    if not axes:
        return g.cast(x, g.dtype) if x.dtype != g.dtype else g.op("Identity", x)
    return g.reduce("ReduceSum", g.cast(x, g.dtype), axes, keepdim)


@rule(aten.mean.dim)
def mean_dims(
    g: Ops, x: Value, dims: Sequence[int] | None, keepdim: bool = False, dtype: Any = None
) -> Value:
    axes = axes_of(dims, x.ndim)
    x = g.cast(x, g.dtype)
    return g.reduce("ReduceMean", x, axes, keepdim) if axes else g.op("Identity", x)


def _extremum(kind: str, boolean: str) -> Any:
    def apply(g: Ops, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
        axes = axes_of(dims, x.ndim)
        if x.dtype == torch.bool:
            return g.reduce(boolean, x, axes, keepdim) if axes else g.op("Identity", x)
        return g.reduce(kind, x, axes, keepdim) if axes else g.op("Identity", x)

    return apply


RULES.add(aten.amax.default, _extremum("ReduceMax", "ReduceAny"))
RULES.add(aten.amin.default, _extremum("ReduceMin", "ReduceAll"))
RULES.add(aten.max.default, _extremum("ReduceMax", "ReduceAny"))
RULES.add(aten.min.default, _extremum("ReduceMin", "ReduceAll"))


@rule(aten.prod.default)
def prod_all(g: Ops, x: Value, dtype: Any = None) -> Value:
    return _product_over(g, x, None, False)


@rule(aten.prod.dim_int)
def prod_dim(g: Ops, x: Value, dim: int, keepdim: bool = False, dtype: Any = None) -> Value:
    return _product_over(g, x, dim, keepdim)


def _product_over(g: Ops, x: Value, dims: Any, keepdim: bool) -> Value:
    """A product of 16-bit floats is rounded once: that of some of them may overflow."""
    x = g.cast(x, g.dtype)
    if not x.ndim:
        return x
    return g.cast(g.reduce("ReduceProd", g.wide(x), axes_of(dims, x.ndim), keepdim), g.dtype)


def _truth(kind: str) -> Any:
    def apply(g: Ops, x: Value, dims: Any = None, keepdim: bool = False) -> Value:
        result = g.truth(x)
        axes = axes_of(dims, x.ndim) if dims != [] else []  # a sum over [] reduces all dimensions
        result = g.reduce(kind, result, axes, keepdim) if axes else result
        return g.cast(result, g.dtype)

    return apply


for _packet, _kind in ((aten.any, "ReduceAny"), (aten.all, "ReduceAll")):
    for _name in ("default", "dim", "dims"):
        RULES.add(getattr(_packet, _name), _truth(_kind))


@rule(aten.logsumexp.default)
def logsumexp(g: Ops, x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
    """log sum exp(x - m) + m, where an infinite maximum m counts as 0."""
    axes = axes_of(dims, x.ndim)
    wide = g.wide(g.cast(x, g.dtype))
    if not axes:
        return g.op("Identity", g.cast(x, g.dtype))
    if is_empty(g, x):
        raise NoRule("logsumexp of an empty tensor")
    largest = g.reduce("ReduceMax", wide, axes, True)
    shift = g.where(g.op("IsInf", largest), 0.0, largest, largest.dtype)
    total = g.reduce("ReduceSum", g.op("Exp", g.sub(wide, shift)), axes, True)
    result = g.add(g.op("Log", total), shift)
    return g.cast(result if keepdim else g.squeeze(result, axes), g.dtype)


RULES.update({
    aten.sum.default: lambda g, x, dtype=None: sum_dims(g, x, None),
    aten.mean.default: lambda g, x, dtype=None: mean_dims(g, x, None),
})  # fmt: skip


# ---- spread --------------------------------------------------------------------------------------


def variance(
    g: Ops, x: Value, dims: Sequence[int] | None, correction: Any, keepdim: bool
) -> tuple[Value, Value]:
    """Variance and mean, from the centered values, in at least float32; a correction of None is 1.

    The mean of equal numbers is rounded as by the vendor's operator, where eager's may be exact:
    bounding it would take two more reductions.
    """
    axes = axes_of(dims, x.ndim)
    correction = 1 if correction is None else correction
    wide = g.wide(x)
    mean = g.reduce("ReduceMean", wide, axes, True) if axes else wide
    squares = g.op("Square", g.sub(wide, mean))
    total = g.reduce("ReduceSum", squares, axes, True) if axes else squares
    count = count_of(x, axes) if axes else 1
    left = g.number(count - correction, total.dtype)
    if not isinstance(count, int) or count - correction <= 0:
        left = g.op("Maximum", left, g.const(0.0, total.dtype))
    spread = g.op("Div", total, left)
    if not keepdim and axes:
        spread, mean = g.squeeze(spread, axes), g.squeeze(mean, axes)
    return spread, mean


@rule(aten.var.correction)
def var(g: Ops, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Value:
    return g.cast(variance(g, x, dim, correction, keepdim)[0], g.dtype)


@rule(aten.std.correction)
def std(g: Ops, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Value:
    spread, _ = variance(g, x, dim, correction, keepdim)
    return g.cast(g.op("Sqrt", spread), g.dtype)


@rule(aten.var_mean.correction)
def var_mean(
    g: Ops, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Value, Value]:
    spread, mean = variance(g, x, dim, correction, keepdim)
    return g.cast(spread, g.dtype), g.cast(mean, g.dtype)


@rule(aten.std_mean.correction)
def std_mean(
    g: Ops, x: Value, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Value, Value]:
    spread, mean = variance(g, x, dim, correction, keepdim)
    return g.cast(g.op("Sqrt", spread), g.dtype), g.cast(mean, g.dtype)


# ---- positions -----------------------------------------------------------------------------------


def _position(kind: str) -> Any:
    def apply(g: Ops, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if x.ndim == 0:
            return g.full([], 0, torch.int64)
        x = _comparable(g, x)
        if dim is None:
            flat = g.reshape(x, [math.prod(x.shape)])
            found = g.op(kind, flat, g.const(0, torch.int64), dtype=torch.int64)
        else:
            axis = g.const(dim % x.ndim, torch.int32)
            found = g.op(kind, x, axis, dtype=torch.int64)
        return g.reshape(found, g.shape)

    return apply


def _comparable(g: Ops, x: Value) -> Value:
    return g.cast(x, torch.int32) if x.dtype == torch.bool else x


RULES.add(aten.argmax.default, _position("ArgMax"))
RULES.add(aten.argmin.default, _position("ArgMin"))


def _value_and_position(kind: str) -> Any:
    def apply(g: Ops, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        if x.ndim == 0:
            return g.op("Identity", x), g.full([], 0, torch.int64)
        dim %= x.ndim
        number = _comparable(g, x)
        found = g.op(kind, number, g.const(dim, torch.int64), dtype=torch.int64)
        place = g.unsqueeze(found, dim)
        value = g.op("GatherElements", number, place, dim=dim)
        if not keepdim:
            value, place = g.squeeze(value, [dim]), found
        return g.cast(value, x.dtype), place

    return apply


RULES.add(aten.max.dim, _value_and_position("ArgMax"))
RULES.add(aten.min.dim, _value_and_position("ArgMin"))


@rule(aten.topk.default)
def topk(
    g: Ops, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    if x.ndim == 0:
        return g.op("Identity", x), g.full([], 0, torch.int64)
    count = g.number(k, torch.int32)
    values, places = g.ops("TopK", x, count, sorted=sorted, dim=dim % x.ndim, largest=largest)
    return values, g.cast(places, torch.int64)


@rule(aten.sort.default)
def sort(g: Ops, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, Value]:
    return sort_stable(g, x, stable=False, dim=dim, descending=descending)


@rule(aten.sort.stable)
def sort_stable(
    g: Ops, x: Value, *, stable: bool | None = False, dim: int = -1, descending: bool = False
) -> tuple[Value, Value]:
    if x.ndim == 0:
        return g.op("Identity", x), g.full([], 0, torch.int64)
    number = _comparable(g, x)
    order = list(range(x.ndim))  # the operator works on the last axis
    order[dim], order[-1] = order[-1], order[dim]
    number = g.transpose(number, order)
    values, places = g.ops("Sort", number, axis=-1, descending=descending, stable=True)
    return (
        g.cast(g.transpose(values, order), x.dtype),
        g.cast(g.transpose(places, order), torch.int64),
    )


@rule(aten.kthvalue.default)
def kthvalue(
    g: Ops, x: Value, k: Any, dim: int = -1, keepdim: bool = False
) -> tuple[Value, Value | None]:
    if g.is_read(1):
        raise NoRule("a position among equal values, which eager's selection algorithm determines")
    if x.ndim == 0:
        return g.op("Identity", x), None
    dim %= x.ndim
    value, _ = _in_order(g, x, k, dim)
    return value if keepdim else g.squeeze(value, [dim]), None


def _in_order(g: Ops, x: Value, k: Any, dim: int) -> tuple[Value, Value]:
    """The k-th smallest values, counted from 1, and the first positions of these."""
    values, places = sort_stable(g, x, dim=dim)
    return g.slice(values, dim, k - 1, k), g.slice(places, dim, k - 1, k)


# ---- scans ---------------------------------------------------------------------------------------


def _scan(kind: str) -> Any:
    def apply(g: Ops, x: Value, dim: int, dtype: Any = None) -> Value:
        x = g.cast(x, g.dtype)
        if x.ndim == 0:
            return g.op("Identity", x)
        return g.op(kind, x, g.const(dim % x.ndim, torch.int32))

    return apply


RULES.add(aten.cumsum.default, _scan("Cumsum"))
RULES.add(aten.cumprod.default, _scan("Cumprod"))
RULES.add(aten.logcumsumexp.default, _scan("CumulativeLogsumexp"))


def _extremum_scan(kind: str, attr: str) -> Any:
    def apply(g: Ops, x: Value, dim: int) -> tuple[Value, Value]:
        if x.ndim == 0:
            return g.op("Identity", x), g.full([], 0, torch.int64)
        number = _comparable(g, x)
        values, places = g.ops(kind, number, **{attr: dim % x.ndim})  # places are int32
        return g.cast(values, x.dtype), g.cast(places, torch.int64)

    return apply


RULES.add(aten.cummax.default, _extremum_scan("Cummax", "dim"))
RULES.add(aten.cummin.default, _extremum_scan("Cummin", "axis"))


@rule(aten.searchsorted.Tensor)
def searchsorted(
    g: Ops, sequence: Value, values: Value, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Value | None = None,
) -> Value:  # fmt: skip
    if sorter is not None:
        sequence = g.op("GatherElements", sequence, sorter, dim=sequence.ndim - 1)
    if values.dtype != sequence.dtype:
        dtype = torch.promote_types(sequence.dtype, values.dtype)
        sequence, values = g.cast(sequence, dtype), g.cast(values, dtype)
    right = right or side == "right"
    return g.op("SearchSorted", sequence, values, dtype=g.dtype, right=right)


@rule(aten.bucketize.Tensor)
def bucketize(
    g: Ops, x: Value, boundaries: Value, *, out_int32: bool = False, right: bool = False
) -> Value:
    return searchsorted(g, boundaries, x, right=right)


@rule(aten.mode.default)
def mode(g: Ops, x: Value, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value | None]:
    """The smallest of the most frequent values."""
    if g.is_read(1):
        raise NoRule("a position among equal values, which eager's sort determines")
    if x.dtype.is_floating_point:
        raise NoRule("the mode of floating-point numbers, among which NaN may be")
    if x.ndim == 0:
        return g.op("Identity", x), None
    dim %= x.ndim
    number = g.cast(x, torch.int64)
    alike = g.op("Equal", g.unsqueeze(number, dim), g.unsqueeze(number, dim + 1))
    count = g.reduce("ReduceSum", g.cast(alike, torch.int64), [dim], False)
    often = g.op("Equal", count, g.reduce("ReduceMax", count, [dim], True))
    beyond = torch.iinfo(torch.int64).max
    found = g.where(often, number, beyond, torch.int64)
    return g.cast(g.reduce("ReduceMin", found, [dim], keepdim), x.dtype), None


@rule(aten.median.dim)
def median_dim(g: Ops, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    """The lower of the two middle values; NaN if there is any."""
    if x.ndim == 0:
        return g.op("Identity", x), g.full([], 0, torch.int64)
    dim %= x.ndim
    size = x.shape[dim]
    value, place = _in_order(g, x, (size + 1) // 2, dim)
    if x.dtype.is_floating_point:
        odd = g.op("IsNan", x)
        first = g.op("ArgMax", g.cast(odd, torch.int32), g.const(dim, torch.int64),
                     dtype=torch.int64)  # fmt: skip
        some = g.reduce("ReduceAny", odd, [dim], True)
        place = g.op("Select", some, g.unsqueeze(first, dim), place)
        value = g.where(some, math.nan, value, x.dtype)
    if keepdim:
        return value, place
    return g.squeeze(value, [dim]), g.squeeze(place, [dim])


@rule(aten.median.default)
def median(g: Ops, x: Value) -> Value:
    if x.ndim == 0:
        return g.op("Identity", x)
    if is_empty(g, x):
        raise NoRule("the median of an empty tensor")
    return median_dim(g, g.reshape(x, [math.prod(x.shape)]), 0)[0]
