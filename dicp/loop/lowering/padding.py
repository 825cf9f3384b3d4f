"""Reflection and replication padding, and their gradients.

Padding reads mirrored or repeated coordinates; loops are split where these change direction, so
that rows are copied as vectors. The gradient adds up the padded elements that read each input
element where these are few, else it is a scatter-add.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const
from dicp.loop.ir.index import Index, Size, normal
from dicp.loop.lowering.conditions import all_of, compare
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.indexing import proven
from dicp.loop.lowering.layout import as_size, sizes_of
from dicp.loop.lowering.scatter import scattered
from dicp.loop.lowering.windows import guarded
from dicp.loop.thresholds import MAX_UNROLLED
from dicp.rules import RuleTable

aten = torch.ops.aten
PADDING = RuleTable()


Fold = Callable[[Index, Index], Expr]
"""The coordinate that padding reads for one beyond 0 .. `last`, given both."""


def _reflected(at: Index, last: Index) -> Expr:
    """min(max(x, -x), 2 * last - x): mirrored at both ends, without repeating the border element.

    Loops are split where an extremum of indices changes from one operand to the other.
    """
    size = apply("maximum", torch.int64, ir.index_value(at), ir.index_value(at * -1))
    return apply("minimum", torch.int64, size, ir.index_value(last * 2 + at * -1))


def _replicated(at: Index, last: Index) -> Expr:
    low = apply("maximum", torch.int64, ir.index_value(at), const(0, torch.int64))
    return apply("minimum", torch.int64, low, ir.index_value(last))


def _sources(
    fold: Fold, idx: Sequence[Index], shape: Sequence[Size], padding: Sequence[Any]
) -> list[Index]:
    """Coordinates in the unpadded tensor of the element that the padded one holds at `idx`."""
    result = list(idx)
    for k in range(len(padding) // 2):
        axis = len(shape) - 1 - k
        at = idx[axis] + normal(-1 * as_size(padding[2 * k]))
        result[axis] = proven(fold(at, Index(normal(shape[axis] - 1))), shape[axis])
    return result


def _pad(fold: Fold) -> Callable[..., Value]:
    def lowered(lw: Lowering, x: Value, padding: Sequence[Any]) -> Value:
        return lw.pointwise(
            sizes_of(lw.meta().shape), x.dtype,
            lambda idx: x.at(_sources(fold, idx, x.shape, padding)),
        )  # fmt: skip

    return lowered


GuardedCoordinate = tuple[Index, list[Expr]]
"""A coordinate in the padded tensor, and the conditions under which it holds an element."""


def _reflections(i: Index, last: Size, low: int, high: int) -> list[GuardedCoordinate]:
    here = ir.index_value(i)
    left = [compare("gt", here, 0), compare("le", here, low)]
    right = [
        compare("lt", here, ir.index_value(Index(last))),
        compare("ge", here, ir.index_value(Index(normal(last - high)))),
    ]
    end = normal(2 * last + low)
    return [
        (i + low, []), *[(i * -1 + low, left)] * (low > 0),
        *[(i * -1 + end, right)] * (high > 0),
    ]  # fmt: skip


def _replications(i: Index, last: Size, low: int, high: int) -> list[GuardedCoordinate]:
    first = [compare("le", ir.index_value(i), 0)]
    final = [compare("ge", ir.index_value(i), ir.index_value(Index(last)))]
    return [
        (i + low, []), *((Index(k), first) for k in range(low)),
        *((i + (low + k + 1), final) for k in range(high)),
    ]  # fmt: skip


def _pad_backward(
    fold: Fold, places: Callable[..., list[GuardedCoordinate]]
) -> Callable[..., Value]:
    def lowered(lw: Lowering, g: Value, x: Value, padding: Sequence[Any]) -> Value:
        dtype = opmath_dtype(g.dtype)
        sizes = x.shape[x.ndim - len(padding) // 2 :]
        margins = list(zip(padding[::2], padding[1::2], strict=True))[::-1]

        def body(idx: tuple[Index, ...]) -> Expr:
            axes = [
                places(i, normal(size - 1), *pads)
                for i, size, pads in zip(idx[-len(sizes) :], sizes, margins, strict=True)
            ]
            terms = []
            for point in itertools.product(*axes):
                at = [*idx[: -len(sizes)], *(place for place, _ in point)]
                test = all_of([t for _, tests in point for t in tests])
                terms.append(guarded(test, cast(g.at(at), dtype), 0))
            return reduce(operator.add, terms)

        if all(isinstance(p, int) and p >= 0 for p in padding):
            count = math.prod(len(places(Index(0), 1, *pads)) for pads in margins)
            if count <= MAX_UNROLLED:
                return lw.cast(lw.pointwise(x.shape, dtype, body), x.dtype)
        zeros = lw.pointwise(x.shape, dtype, lambda idx: const(0, dtype))
        total = scattered(
            lw, zeros, g.shape,
            lambda idx: cast(g.at(idx), dtype),
            lambda idx: _sources(fold, idx, x.shape, padding),
            "sum",
        )  # fmt: skip
        return lw.cast(total, x.dtype)

    return lowered


for _fold, _places, _forward, _backward in (
    (_reflected, _reflections,
     (aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d),
     (aten.reflection_pad1d_backward, aten.reflection_pad2d_backward,
      aten.reflection_pad3d_backward)),
    (_replicated, _replications,
     (aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d),
     (aten.replication_pad1d_backward, aten.replication_pad2d_backward,
      aten.replication_pad3d_backward)),
):  # fmt: skip
    for _op in _forward:
        PADDING.add(_op.default, _pad(_fold))
    for _op in _backward:
        PADDING.add(_op.default, _pad_backward(_fold, _places))
