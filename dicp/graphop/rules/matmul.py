"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from dicp.graphop.operators import NoRule, Ops, Value
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def product(g: Ops, x: Value, y: Value) -> Value:
    """x @ y for matrices or equally batched matrices, in the operands' type."""
    if not x.dtype.is_floating_point and x.dtype != torch.int32:
        # int32 would overflow where a wider type does not: multiply and add
        terms = g.op("Mul", g.unsqueeze(x, x.ndim), g.unsqueeze(y, y.ndim - 2))
        return g.reduce("ReduceSum", terms, [x.ndim - 1], False)
    kind = "MatMul" if x.ndim == 2 else "BatchMatMul"
    return g.op(kind, x, y)


RULES.update({
    (aten.mm.default, aten.bmm.default): lambda g, x, y: product(g, x, y),
    aten.mv.default: lambda g, x, y: g.reshape(product(g, x, g.unsqueeze(y, 1)), g.shape),
    (aten.dot.default, aten.vdot.default):
        lambda g, x, y: g.reshape(product(g, g.unsqueeze(x, 0), g.unsqueeze(y, 1)), []),
})  # fmt: skip


def _scaled_product(g: Ops, x: Value, y: Value, alpha: Any) -> Value:
    """The product that is scaled by `alpha`: in 16 bits it might overflow before that."""
    return product(g, x, y) if alpha == 1 else product(g, g.wide(x), g.wide(y))


def _scaled_sum(g: Ops, bias: Value, result: Value, beta: Any, alpha: Any) -> Value:
    """beta bias + alpha result; a beta of 0 ignores the bias, NaN included."""
    dtype = g.dtype
    wide_bias, wide = (g.wide(v) if (alpha, beta) != (1, 1) else v for v in (bias, result))
    if alpha != 1:
        wide = g.mul(wide, alpha)
    if beta == 0:
        return g.cast(wide, dtype)
    if beta != 1:
        wide_bias = g.mul(wide_bias, beta)
    return g.cast(g.op("Add", g.cast(wide_bias, wide.dtype), wide), dtype)


@rule(aten.addmm.default)
def addmm(g: Ops, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    row = bias.ndim == 1 and g.same(bias.shape[0], y.shape[1])
    if alpha == beta == 1 and row and x.dtype.is_floating_point:
        return g.op("MatMul", x, y, bias)
    return _scaled_sum(g, bias, _scaled_product(g, x, y, alpha), beta, alpha)


@rule(aten.baddbmm.default)
def baddbmm(g: Ops, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    return _scaled_sum(g, bias, _scaled_product(g, x, y, alpha), beta, alpha)


@rule(aten.addmv.default)
def addmv(g: Ops, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    result = g.squeeze(_scaled_product(g, x, g.unsqueeze(y, 1), alpha), [1])
    return _scaled_sum(g, bias, result, beta, alpha)


@rule(aten.addr.default)
def addr(g: Ops, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    if g.dtype == torch.bool:
        raise NoRule("an outer product of booleans")
    left, right = (g.cast(v, g.dtype) for v in (x, y))
    left, right = (v if alpha == 1 else g.wide(v) for v in (left, right))
    result = g.op("Mul", g.unsqueeze(left, 1), g.unsqueeze(right, 0))
    return _scaled_sum(g, g.cast(bias, g.dtype), result, beta, alpha)


@rule(aten.addbmm.default)
def addbmm(g: Ops, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    result = g.reduce("ReduceSum", g.wide(_scaled_product(g, x, y, alpha)), [0], False)
    result = g.cast(result, x.dtype) if alpha == 1 else result
    return _scaled_sum(g, bias, result, beta, alpha)
