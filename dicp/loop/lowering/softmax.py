"""Softmax, its logarithm, their gradients, and the logarithm of a sum of exponentials."""

from __future__ import annotations

import math
from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast
from dicp.loop.ir.index import Index
from dicp.loop.lowering.conditions import compare, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.reduction import axes_of, finish, total
from dicp.loop.lowering.views import wrap
from dicp.rules import NoRule, RuleTable, of_vectors

aten = torch.ops.aten
SOFTMAX = RuleTable()
rule = SOFTMAX.register


@rule(aten.logsumexp)
def logsumexp(lw: Lowering, x: Value, dim: Any, keepdim: bool = False) -> Value:
    dtype = opmath_dtype(lw.meta().dtype)
    axes = axes_of(x, dim)
    if any(x.shape[a] == 0 for a in axes) or not axes:
        raise NoRule("logsumexp over an empty axis")
    row_max = lw.reduce("max", x.shape, axes, dtype, lambda idx: cast(x.at(idx), dtype))
    finite = lw.map(
        lambda m: select(compare("eq", apply("abs", dtype, m), math.inf), 0.0, m), row_max
    )

    def body(idx: tuple[Index, ...]) -> Expr:
        return apply("exp", dtype, cast(x.at(idx), dtype) - finite.broadcast_at(idx))

    sums = lw.reduce("sum", x.shape, axes, dtype, body)
    result = lw.map(lambda s, m: apply("log", dtype, s) + m, sums, finite)
    return finish(lw, result, axes, keepdim)


def _shifted(lw: Lowering, x: Value, axis: int, dtype: torch.dtype) -> tuple[Value, Value]:
    row_max = lw.reduce("max", x.shape, [axis], dtype, lambda idx: cast(x.at(idx), dtype))
    moved = lw.map(lambda e, m: cast(e, dtype) - m, x, row_max, dtype=dtype)
    return moved, row_max


@rule(aten._softmax.default, aten._safe_softmax.default)
@of_vectors
def softmax(lw: Lowering, x: Value, dim: int, half_to_float: Any = False) -> Value:
    out = lw.meta().dtype
    dtype = opmath_dtype(out)
    if any(s == 0 for s in x.shape):
        return lw.pointwise(x.shape, out, lambda idx: ir.const(1.0, out))
    axis = wrap(dim, x.ndim)
    moved, row_max = _shifted(lw, x, axis, dtype)
    e = lw.map(lambda v: apply("exp", dtype, v), moved)
    s = total(lw, e, [axis], dtype)
    result = lw.map(lambda e, s: e / s, e, s)
    if lw.node.target is aten._safe_softmax.default:
        empty = -math.inf
        result = lw.map(lambda r, m: select(compare("eq", m, empty), 0.0, r), result, row_max)
    return lw.cast(result, out)


@rule(aten._log_softmax.default)
@of_vectors
def log_softmax(lw: Lowering, x: Value, dim: int, half_to_float: bool = False) -> Value:
    out = lw.meta().dtype
    dtype = opmath_dtype(out)
    if any(s == 0 for s in x.shape):
        return lw.pointwise(x.shape, out, lambda idx: ir.const(0.0, out))
    axis = wrap(dim, x.ndim)
    moved, _ = _shifted(lw, x, axis, dtype)
    s = total(lw, moved, [axis], dtype, lambda v: apply("exp", dtype, v))
    lse = lw.map(lambda s: apply("log", dtype, s), s)
    return lw.map(lambda v, s: cast(v - s, out), moved, lse, dtype=out)


@rule(aten._softmax_backward_data)
@of_vectors
def softmax_backward(lw: Lowering, g: Value, y: Value, dim: int, input_dtype: Any) -> Value:
    out = lw.meta().dtype
    dtype = opmath_dtype(g.dtype)
    axis = wrap(dim, y.ndim)
    lw.require_equal(g.shape, y.shape, "the gradient does not fit the result")
    gy = lw.map(lambda g, y: cast(g, dtype) * cast(y, dtype), g, y, dtype=dtype)
    s = total(lw, gy, [axis], dtype)
    return lw.map(
        lambda g, y, s: cast((cast(g, dtype) - s) * cast(y, dtype), out), g, y, s, dtype=out
    )


@rule(aten._log_softmax_backward_data)
@of_vectors
def log_softmax_backward(lw: Lowering, g: Value, y: Value, dim: int, input_dtype: Any) -> Value:
    out = lw.meta().dtype
    dtype = opmath_dtype(g.dtype)
    lw.require_equal(g.shape, y.shape, "the gradient does not fit the result")
    s = total(lw, g, [wrap(dim, y.ndim)], dtype)

    def body(g: Expr, y: Expr, s: Expr) -> Expr:
        return cast(cast(g, dtype) - apply("exp", dtype, cast(y, dtype)) * s, out)

    return lw.map(body, g, y, s, dtype=out)
