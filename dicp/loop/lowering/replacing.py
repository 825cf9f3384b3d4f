"""Tensors of which a slice, a column or a diagonal is replaced.

In: a tensor and what replaces a part of it. Out: one compute, which selects at each point, or a
copy of the tensor and a scatter of the part.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import sympy
import torch

from dicp.loop.ir import expr as ir
from dicp.loop.ir.index import ZERO, Index, Size, floordiv, is_below, mod, normal, quotient
from dicp.loop.lowering.conditions import both, compare
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.scatter import scattered
from dicp.loop.lowering.views import from_start, slice_start, wrap
from dicp.loop.thresholds import MAX_UNROLLED_STEP
from dicp.rules import RuleTable

aten = torch.ops.aten
REPLACING = RuleTable()
rule = REPLACING.register


def _replaced(
    lw: Lowering, x: Value, src: Value, inside: Callable[[tuple[Index, ...]], ir.Expr],
    place: Callable[[tuple[Index, ...]], list[Index]],
) -> Value:  # fmt: skip
    """x with the points where `inside(idx)` holds read from `src` at `place(idx)`."""

    def body(idx: tuple[Index, ...]) -> ir.Expr:
        test, at = inside(idx), place(idx)
        value = ir.cast(src.at(at), x.dtype)
        if not all(map(is_below, at, src.shape)):
            value = ir.masked(test, value)
        return ir.apply("where", x.dtype, test, value, x.at(idx))

    return lw.pointwise(x.shape, x.dtype, body)


def _stored_over(
    lw: Lowering, x: Value, src: Value, target: Callable[[tuple[Index, ...]], list[Index]]
) -> Value:
    """A copy of x with each element of `src` stored at `target(idx)`."""
    return scattered(lw, x, src.shape, lambda idx: ir.cast(src.at(idx), x.dtype), target)


UNLIKE_THE_SLICE = "the source does not fit the slice it replaces"


def _require_slice(
    lw: Lowering, x: Value, src: Value, dim: int, start: Any, end: Any, step: int
) -> None:
    """Require a source of the slice's shape; eager raises the error for any other."""
    shape = list(x.shape)
    size, given = x.shape[dim], (0 if start is None else start, end, step)
    known = isinstance(size, int) and all(isinstance(v, (int, NoneType)) for v in given)
    shape[dim] = len(range(*slice(*given).indices(size))) if known else src.shape[dim]
    lw.require_equal(src.shape, shape, UNLIKE_THE_SLICE)


@rule(aten.select_scatter)
def select_scatter(lw: Lowering, x: Value, src: Value, dim: int, index: int) -> Value:
    dim = wrap(dim, x.ndim)
    at = from_start(lw, x.shape[dim], index)
    lw.require_equal(src.shape, [*x.shape[:dim], *x.shape[dim + 1 :]], UNLIKE_THE_SLICE)
    return _slice_replaced(lw, x, lw.unsqueeze(src, dim), dim, at, 1)


@rule(aten.slice_scatter)
def slice_scatter(
    lw: Lowering, x: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Value:  # fmt: skip
    dim = wrap(dim, x.ndim)
    _require_slice(lw, x, src, dim, start, end, step)
    return _slice_replaced(lw, x, src, dim, slice_start(lw, x.shape[dim], start), step)


def _slice_replaced(lw: Lowering, x: Value, src: Value, dim: int, first: Size, step: int) -> Value:
    """x with its slice from `first` along `dim`, as long as `src`, read from that."""
    constant = isinstance(step, int) and step <= MAX_UNROLLED_STEP
    unrolled = constant and quotient(x.shape[dim], step) is not None
    if lw.overwrites and step != 1 and not unrolled:
        return _stored_over(
            lw, x, src, lambda idx: [*idx[:dim], idx[dim] * step + first, *idx[dim + 1 :]]
        )
    last = normal(first + (src.shape[dim] - 1) * step)
    phase = first % step if isinstance(first, int) else 0
    shift = normal(phase - first)  # a multiple of `step` where it is known: loops of `step` follow

    def inside(idx: tuple[Index, ...]) -> ir.Expr:
        here = ir.index_value(idx[dim])
        test = compare("ge", here, ir.index_value(Index(first)))
        test = both(test, compare("le", here, ir.index_value(Index(last))))
        if step != 1:
            own = ir.index_value(mod(idx[dim] + shift, step))
            test = both(test, both(compare("ge", own, phase), compare("le", own, phase)))
        return test

    def place(idx: tuple[Index, ...]) -> list[Index]:
        at = floordiv(idx[dim] + shift, step)
        return [*idx[:dim], ZERO if src.shape[dim] == 1 else at, *idx[dim + 1 :]]

    return _replaced(lw, x, src, inside, place)


@rule(aten.diagonal_scatter)
def diagonal_scatter(
    lw: Lowering, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    a, b = wrap(dim1, x.ndim), wrap(dim2, x.ndim)
    rows, columns = x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0)
    kept = [s for k, s in enumerate(x.shape) if k not in (a, b)]
    length = normal(sympy.Max(sympy.Min(rows, columns), 0))
    lw.require_equal(src.shape, [*kept, length], UNLIKE_THE_SLICE)
    if lw.overwrites:

        def target(idx: tuple[Index, ...]) -> list[Index]:
            at = list(idx[:-1])
            for axis in sorted((a, b)):
                at.insert(axis, idx[-1] + max(-offset if axis == a else offset, 0))
            return at

        return _stored_over(lw, x, src, target)

    def inside(idx: tuple[Index, ...]) -> ir.Expr:
        here = ir.index_value(idx[a] + offset)
        return compare("eq", here, ir.index_value(idx[b]))

    def place(idx: tuple[Index, ...]) -> list[Index]:
        rest = [i for k, i in enumerate(idx) if k not in (a, b)]
        by_row, by_column = idx[a] + min(offset, 0), idx[b] + min(-offset, 0)
        return [*rest, by_row if is_below(by_row, length) else by_column]

    return _replaced(lw, x, src, inside, place)


@rule(aten.diag_embed.default)
def diag_embed(lw: Lowering, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    shape = sizes_of(lw.meta().shape)
    zeros = lw.pointwise(shape, x.dtype, lambda idx: ir.const(0, x.dtype))
    return diagonal_scatter(lw, zeros, x, offset, dim1, dim2)
