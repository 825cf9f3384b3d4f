"""The negative log-likelihood of labels, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from dicp.dtypes import opmath_dtype
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const
from dicp.loop.ir.index import ZERO, Index
from dicp.loop.lowering.conditions import both, compare, select
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.indexing import checked, proven
from dicp.loop.lowering.reduction import total
from dicp.rules import NoRule, RuleTable

aten = torch.ops.aten
LOSS = RuleTable()
rule = LOSS.register


@rule(aten.nll_loss_forward.default)
def nll_loss_forward(
    lw: Lowering, x: Value, target: Value, weight: Any, reduction: int, ignore_index: int
) -> tuple[Value, Value]:
    dtype = opmath_dtype(x.dtype)
    rows = x.shape[:-1]
    if x.shape[-1] == 0:
        raise NoRule("a loss over an empty axis of classes")

    def picked(idx: tuple[Index, ...]) -> tuple[Expr, Expr]:
        label = target.at(idx if target.ndim else [])
        skip = compare("eq", label, lw.scalar(ignore_index, label.dtype))
        label = checked(lw, select(skip, 0, label), x.shape[-1], wrap=False)
        at = proven(label, x.shape[-1])
        scale = cast(weight.at([at]), dtype) if weight is not None else const(1.0, dtype)
        scale = select(skip, 0.0, scale)
        loss = select(skip, 0.0, -cast(x.at([*idx, at]), dtype) * scale)
        return loss, scale

    losses = lw.pointwise(rows, dtype, lambda idx: picked(idx)[0])
    scales = lw.pointwise(rows, dtype, lambda idx: picked(idx)[1])
    axes = list(range(len(rows)))
    out = lw.meta(0).dtype
    if reduction == 0 and rows:
        zero = lw.pointwise((), dtype, lambda idx: const(0.0, dtype))
        return lw.cast(losses, out), lw.cast(zero, lw.meta(1).dtype)
    weight_sum = lw.squeeze(total(lw, scales, axes, dtype), axes)
    loss_sum = lw.squeeze(total(lw, losses, axes, dtype), axes)
    if reduction == 1:
        loss_sum = lw.map(lambda a, b: a / b, loss_sum, weight_sum)
    return lw.cast(loss_sum, out), lw.cast(weight_sum, lw.meta(1).dtype)


@rule(aten.nll_loss_backward.default)
def nll_loss_backward(
    lw: Lowering, g: Value, x: Value, target: Value, weight: Any, reduction: int,
    ignore_index: int, total_weight: Value,
) -> Value:  # fmt: skip
    dtype = x.dtype

    def body(idx: tuple[Index, ...]) -> Expr:
        label = cast(target.at(idx[:-1] if target.ndim else []), torch.int64)
        grad = g.at(idx[:-1] if g.ndim else [])
        if reduction == 1:
            grad = grad / cast(total_weight.at([ZERO] * total_weight.ndim), dtype)
        skip = compare("eq", label, lw.scalar(ignore_index, torch.int64))
        label = checked(lw, select(skip, 0, label), x.shape[-1], wrap=False)
        hit = compare("eq", label, ir.index_value(idx[-1]))
        hit = both(hit, apply("logical_not", torch.bool, skip))
        if weight is not None:
            grad = grad * weight.at([idx[-1]])
        return select(hit, -grad, 0.0)

    return lw.pointwise(x.shape, dtype, body)
