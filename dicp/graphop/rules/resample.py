"""Antialiased downsampling: products with matrices of weights, one per dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.operators import Ops, Value
from dicp.graphop.rules.pooling import between
from dicp.rules import RuleTable

aten = torch.ops.aten
RULES = RuleTable()
rule = RULES.register


def _scale(size: Any, out: Any, align_corners: bool, given: float | None) -> Any:
    """The number of the input's elements per element of the result."""
    if align_corners:
        return (size - 1) / (out - 1) if out != 1 else 0.0
    return 1.0 / given if given else size / out


def _weights(
    g: Ops, size: Any, out: Any, align_corners: bool, given: float | None, dtype: torch.dtype
) -> Value:
    """(out, size): a triangle around each result's position, as wide as the distance of two
    results."""
    scale = _scale(size, out, align_corners, given)
    place = g.reshape(g.arange(out, dtype), [out, 1])
    center = g.mul(g.add(place, 0.5), g.number(scale, dtype))
    element = g.reshape(g.arange(size, dtype), [1, size])
    one = g.const(1.0, dtype)
    support = g.op("Maximum", g.number(scale, dtype), one)
    rounded = g.const(0.5, dtype)
    first = g.op("Floor", g.add(g.sub(center, support), rounded))
    last = g.op("Floor", g.add(g.add(center, support), rounded))
    inside = g.op("LogicalAnd", g.op("GreaterEqual", element, first), g.op("Less", element, last))
    distance = g.op("Abs", g.op("Div", g.sub(g.add(element, 0.5), center), support))
    triangle = g.op("Relu", g.op("Sub", one, distance))
    weights = g.where(inside, triangle, 0.0, dtype)
    return g.op("Div", weights, g.reduce("ReduceSum", weights, [1], True))


def _both_weights(
    g: Ops, sizes: Sequence[Any], outs: Sequence[Any], align_corners: bool,
    scales: Sequence[float | None], dtype: torch.dtype,
) -> list[Value]:  # fmt: skip
    return [
        _weights(g, size, out, align_corners, given, dtype)
        for size, out, given in zip(sizes, outs, scales, strict=True)
    ]


@rule(aten._upsample_bilinear2d_aa.default)
def bilinear(
    g: Ops, x: Value, output_size: Sequence[Any], align_corners: bool,
    scales_h: float | None = None, scales_w: float | None = None,
) -> Value:  # fmt: skip
    wide = g.wide(x)
    rows, columns = _both_weights(
        g, x.shape[-2:], output_size, align_corners, (scales_h, scales_w), wide.dtype
    )
    return g.cast(between(g, rows, wide, g.transpose(columns, [1, 0])), x.dtype)


@rule(aten._upsample_bilinear2d_aa_backward.default)
def bilinear_backward(
    g: Ops, dy: Value, output_size: Sequence[Any], input_size: Sequence[Any], align_corners: bool,
    scales_h: float | None = None, scales_w: float | None = None,
) -> Value:  # fmt: skip
    wide = g.wide(dy)
    rows, columns = _both_weights(
        g, input_size[-2:], output_size, align_corners, (scales_h, scales_w), wide.dtype
    )
    return g.cast(between(g, g.transpose(rows, [1, 0]), wide, columns), dy.dtype)
