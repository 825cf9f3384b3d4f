"""Rotary position embedding as one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Value
from dicp.vendor.ascend.fuse.moves import HEADS_BACK, both_ways, order_of, reshaped, source_of
from dicp.vendor.ascend.rules.core import Ge


def rotary(g: Builder, node: Node) -> Sequence[Value] | None:
    # x cos + (-second half of x, first half of x) sin = rotary_mul(x, cos, sin)
    for straight, rotated in both_ways(node):
        if straight.node.kind != "Mul" or rotated.node.kind != "Mul":
            continue
        for half, sine in both_ways(rotated.node):
            x = _rotated(half)
            for other, cosine in both_ways(straight.node):
                if x is other and x is not None and _fit_rotary(g, x, cosine, sine):
                    return [_turned(g, x, cosine, sine)]
    return None


def _turned(g: Builder, x: Value, cosine: Value, sine: Value) -> Value:
    # rotary_mul(transpose(x), cos, sin) = transpose(rotary_mul(x, cos, sin)), heads after rows
    assert isinstance(g, Ge)
    if order_of(x) != HEADS_BACK:
        return g.op("RotaryMul", x, cosine, sine)
    factors = [reshaped(g, f, [f.shape[0], f.shape[2], 1, f.shape[3]]) for f in (cosine, sine)]
    return g.transpose(g.op("RotaryMul", source_of(x), *factors), HEADS_BACK)


def _fit_rotary(g: Builder, x: Value, cosine: Value, sine: Value) -> bool:
    """Four dimensions, even width, and factors of one shape: one for all heads, and for the whole
    batch or for each of its elements."""
    assert isinstance(g, Ge)
    width = x.shape[-1]
    if not g.takes("RotaryMul", "x", x.dtype) or x.dtype == torch.float64:
        return False
    if x.ndim != 4 or not isinstance(width, int) or width % 2 or cosine.ndim != 4:
        return False
    batch, heads, *rest = cosine.shape
    fits = g.same(heads, 1) and g.same_shape(rest, x.shape[2:])
    fits = fits and any(g.same(batch, size) for size in (1, x.shape[0]))
    return fits and g.same_shape(cosine.shape, sine.shape)


def _rotated(value: Value) -> Value | None:
    """x, if the value is (-second half of x, first half of x) along the last dimension."""
    node = value.node
    if node.kind != "ConcatD" or node.attrs["concat_dim"] != value.ndim - 1:
        return None
    parts = node.operands()
    if len(parts) != 2 or parts[0].node.kind != "Neg":
        return None
    second, first = source_of(parts[0]), parts[1]
    if second.node.kind != "StridedSlice" or first.node.kind != "StridedSlice":
        return None
    x, middle = source_of(first), value.shape[-1] // 2
    begin, end = _bounds(second), _bounds(first)
    whole = source_of(second) is x and begin is not None and end is not None
    if whole and begin[0] == middle and end == (0, middle):  # type: ignore[index]
        return x
    return None


def _bounds(value: Value) -> tuple[Any, Any] | None:
    """Begin and end of a slice along the last dimension alone; None for any other slice."""
    node = value.node
    ports = [node.inputs[port] for port in ("begin", "end", "strides")]
    begin, end, steps = (p.known if isinstance(p, Value) else None for p in ports)
    if begin is None or end is None or steps is None or set(steps) != {1}:
        return None
    return (begin[-1], end[-1]) if not any(begin[:-1]) else None
