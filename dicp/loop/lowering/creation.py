"""Tensors made of numbers and indices, copies, and triangles.

In: sizes and numbers, or a tensor to copy. Out: pointwise computes of the loop IR.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dicp.effects import UNINITIALIZED, uninitialized_value
from dicp.loop.ir import expr as ir
from dicp.loop.ir.expr import Expr, apply, cast, const
from dicp.loop.ir.index import Index
from dicp.loop.lowering.core import Lowering, Value
from dicp.loop.lowering.layout import sizes_of
from dicp.loop.lowering.pointwise import elementwise
from dicp.rules import RuleTable

aten = torch.ops.aten
CREATION = RuleTable()
rule = CREATION.register


@rule(aten.full.default, aten.full_like, aten.new_full.default)
def full(lw: Lowering, *args: Any, **kwargs: Any) -> Value:
    meta = lw.meta()
    value = lw.element(args[-1], meta.dtype)
    return lw.pointwise(sizes_of(meta.shape), meta.dtype, lambda idx: value)


CREATION.update({
    (aten.zeros, aten.zeros_like, aten.new_zeros): lambda lw, *args, **kwargs: full(lw, 0),
    UNINITIALIZED: lambda lw, *args, **kwargs: full(lw, uninitialized_value(lw.meta().dtype)),
    (aten.ones, aten.ones_like, aten.new_ones): lambda lw, *args, **kwargs: full(lw, 1),
    aten.scalar_tensor: lambda lw, value, **kwargs: full(lw, value),
})  # fmt: skip


@rule(aten.arange.start_step, aten.arange.start, aten.arange.default)
def arange(lw: Lowering, *args: Any, **kwargs: Any) -> Value:
    meta = lw.meta()
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    wide = torch.int64 if not meta.dtype.is_floating_point else torch.float64
    first, each = lw.scalar(start, wide), lw.scalar(step, wide)

    def body(idx: tuple[Index, ...]) -> Expr:
        return ir.rounded(first + cast(ir.index_value(idx[0]), wide) * each, meta.dtype)

    return lw.pointwise(sizes_of(meta.shape), meta.dtype, body)


@rule(torch.ops.prims.iota.default)
def iota(lw: Lowering, length: Any, *, start: Any, step: Any, **kwargs: Any) -> Value:
    meta = lw.meta()
    first, each = lw.scalar(start, torch.int64), lw.scalar(step, torch.int64)
    return lw.pointwise(
        sizes_of(meta.shape),
        meta.dtype,
        lambda idx: ir.rounded(first + ir.index_value(idx[0]) * each, meta.dtype),
    )


@rule(aten.fill.Scalar, aten.fill.Tensor)
def fill(lw: Lowering, x: Value, value: Any) -> Value:
    return elementwise(lw, (value,), lambda e: e) if isinstance(value, Value) else full(lw, value)


@rule(aten.copy.default)
def copy(lw: Lowering, x: Value, source: Value, non_blocking: bool = False) -> Value:
    meta = lw.meta()
    return lw.pointwise(
        sizes_of(meta.shape), meta.dtype, lambda idx: cast(source.broadcast_at(idx), meta.dtype)
    )


@rule(aten.copy_.default)
def copy_(lw: Lowering, target: Value, source: Value, non_blocking: bool = False) -> Value:
    lw.write(target, source)
    return target


def _triangle(keep_lower: bool) -> Callable[..., Value]:
    def lowered(lw: Lowering, x: Value, diagonal: int = 0) -> Value:
        def body(idx: tuple[Index, ...]) -> Expr:
            row, column = ir.index_value(idx[-2] + diagonal), ir.index_value(idx[-1])
            keep = apply("le" if keep_lower else "ge", torch.bool, column, row)
            return apply("where", x.dtype, keep, x.at(idx), const(0, x.dtype))

        return lw.pointwise(x.shape, x.dtype, body)

    return lowered


CREATION.add(aten.tril.default, _triangle(True))
CREATION.add(aten.triu.default, _triangle(False))
