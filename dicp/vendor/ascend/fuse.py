"""Rewrites among GE operators: transposes become flags, inverse moves cancel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dicp.graphop.builder import Builder
from dicp.graphop.program import Node, Value
from dicp.graphop.rewrite import Rewrite
from dicp.vendor.ascend.rules.core import Ge

_FLAGS = {"MatMulV2": ("transpose_x1", "transpose_x2"), "BatchMatMulV2": ("adj_x1", "adj_x2")}

_BROADCASTING = frozenset({
    "Add", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "Pow", "Equal", "NotEqual", "Less",
    "LessEqual", "Greater", "GreaterEqual", "LogicalAnd", "LogicalOr", "SelectV2", "FloorDiv",
    "FloorMod", "AxpyV2",
})  # fmt: skip


def _order(value: Value) -> list[int] | None:
    """The permutation, if the value is a transpose."""
    if value.node.kind != "Transpose":
        return None
    perm = value.node.inputs["perm"]
    assert isinstance(perm, Value) and perm.known is not None
    return [int(d) for d in perm.known]


def _source(value: Value, port: str = "x") -> Value:
    source = value.node.inputs[port]
    assert isinstance(source, Value)
    return source


def _swaps_matrix(value: Value) -> bool:
    """Whether the value is a transpose of its last two dimensions alone."""
    order = _order(value)
    rank = value.ndim
    return order is not None and order == [*range(rank - 2), rank - 1, rank - 2]


def matrix_product(g: Builder, node: Node) -> Sequence[Value] | None:
    # matmul(transpose(a), b) = matmul(a, b; transpose_x1)
    operands = [node.inputs[port] for port in ("x1", "x2")]
    attrs: dict[str, Any] = dict(node.attrs)
    changed = False
    for k, flag in enumerate(_FLAGS[node.kind]):
        operand = operands[k]
        assert isinstance(operand, Value)
        if _swaps_matrix(operand):
            operands[k] = _source(operand)
            attrs[flag] = not attrs.get(flag, False)
            changed = True
    if not changed:
        return None
    return [g.op(node.kind, *operands, node.inputs.get("bias"), **attrs)]


def transpose(g: Builder, node: Node) -> Sequence[Value] | None:
    # transpose(transpose(x, p), q) = transpose(x, p[q]); moving dimensions of size 1 is a reshape
    assert isinstance(g, Ge)
    value = node.outputs[0]
    order, source = _order(value), _source(value)
    assert order is not None
    inner = _order(source)
    if inner is not None:
        order, source = [inner[d] for d in order], _source(source)
        if order == sorted(order):
            return [source]
    moving = [d for d in order if not g.same(source.shape[d], 1)]
    if moving == sorted(moving):
        return [g.reshape(source, value.shape)]
    return [g.transpose(source, order)] if inner is not None else None


def reshape(g: Builder, node: Node) -> Sequence[Value] | None:
    # reshape(reshape(x)) = reshape(x);  reshape(x, x.shape) = x
    assert isinstance(g, Ge)
    value = node.outputs[0]
    source = _source(value)
    if g.same_shape(source.shape, value.shape):
        return [source]
    if source.node.kind != "Reshape":
        return None
    return [g.reshape(_source(source), value.shape)]


def elementwise(g: Builder, node: Node) -> Sequence[Value] | None:
    # add(broadcast(x), y) = add(x, y), where y has the whole shape
    inputs = dict(node.inputs)
    shape = node.outputs[0].shape
    changed = False
    for port, operand in inputs.items():
        if not isinstance(operand, Value) or operand.node.kind != "BroadcastTo":
            continue
        others = [v for p, v in inputs.items() if p != port and isinstance(v, Value)]
        if any(_spans(g, other, shape) for other in others):
            inputs[port] = _source(operand)
            changed = True
    if changed:
        node.inputs = inputs
    return None


def _spans(g: Builder, value: Value, shape: Sequence[Any]) -> bool:
    return g.same_shape(value.shape, shape)


def rms_norm(g: Builder, node: Node) -> Mapping[Value, Value] | None:
    # rms_norm(a + b) = add_rms_norm(a, b), which gives the sum too
    total = _source(node.outputs[0])
    if total.node.kind != "Add" or not _is_plain_sum(g, total):
        return None
    operands = [total.node.inputs[port] for port in ("x1", "x2")]
    y, rstd, x = g.ops("AddRmsNorm", *operands, node.inputs["gamma"], **node.attrs)
    return {node.outputs[0]: y, node.outputs[1]: rstd, total: x}


def _is_plain_sum(g: Builder, total: Value) -> bool:
    """Of two tensors with the whole shape."""
    return all(g.same_shape(v.shape, total.shape) for v in total.node.operands())


def swish_gate(g: Builder, node: Node) -> Sequence[Value] | None:
    # swish(first half of x) * second half of x = swi_glu(x)
    for gate, up in _both_ways(node):
        if gate.node.kind != "Swish" or gate.node.attrs.get("scale", 1.0) != 1.0:
            continue
        half = _source(gate)
        split = half.node
        if split.kind != "SplitVD" or up.node is not split or (half.index, up.index) != (0, 1):
            continue
        if len(split.outputs) == 2 and g.same_shape(half.shape, up.shape):
            return [g.op("SwiGlu", _source(half), dim=split.attrs["split_dim"])]
    return None


def _both_ways(node: Node) -> list[tuple[Value, Value]]:
    left, right = node.operands()
    return [(left, right), (right, left)]


def rotary(g: Builder, node: Node) -> Sequence[Value] | None:
    # x cos + (-second half of x, first half of x) sin = rotary_mul(x, cos, sin)
    for straight, turned in _both_ways(node):
        if straight.node.kind != "Mul" or turned.node.kind != "Mul":
            continue
        for half, sine in _both_ways(turned.node):
            x = _rotated(g, half)
            for other, cosine in _both_ways(straight.node):
                if x is other and x is not None and _fit_rotary(g, x, cosine, sine):
                    return [g.op("RotaryMul", x, cosine, sine)]
    return None


def _fit_rotary(g: Builder, x: Value, cosine: Value, sine: Value) -> bool:
    """Four dimensions, even width, and factors that are one for all heads."""
    width = x.shape[-1]
    if x.ndim != 4 or not isinstance(width, int) or width % 2 or x.dtype == torch.float64:
        return False
    return all(
        f.ndim == 4 and g.same(f.shape[1], 1) and g.same_shape(f.shape[2:], x.shape[2:])
        for f in (cosine, sine)
    )


def _rotated(g: Builder, value: Value) -> Value | None:
    """x, if the value is (-second half of x, first half of x) along the last dimension."""
    node = value.node
    if node.kind != "ConcatD" or node.attrs["concat_dim"] != value.ndim - 1:
        return None
    parts = node.operands()
    if len(parts) != 2 or parts[0].node.kind != "Neg":
        return None
    second, first = _source(parts[0]), parts[1]
    if second.node.kind != "StridedSlice" or first.node.kind != "StridedSlice":
        return None
    x, middle = _source(first), value.shape[-1] // 2
    begin, end = _bounds(second), _bounds(first)
    whole = _source(second) is x and begin is not None and end is not None
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


def add(g: Builder, node: Node) -> Sequence[Value] | None:
    found = rotary(g, node)
    return found if found is not None else elementwise(g, node)


def mul(g: Builder, node: Node) -> Sequence[Value] | None:
    found = swish_gate(g, node)
    return found if found is not None else elementwise(g, node)


REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(_FLAGS, matrix_product),
    "Transpose": transpose,
    "Reshape": reshape,
    **dict.fromkeys(_BROADCASTING, elementwise),
    "Add": add,
    "Mul": mul,
    "RmsNorm": rms_norm,
}
